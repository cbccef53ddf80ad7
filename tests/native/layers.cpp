// Drives whole decoder layers, meant to be built with AddressSanitizer and UBSan, and with ThreadSanitizer, since
// threads hand stages to each other by counters. Random layers, trees, windows, slots, biases and head norms; every
// buffer of a step ends where the next page must not be touched. The bits must be those of the stages one after the
// other, with any number of threads, also when all but the first come too late to do anything.
#include "cpu/layers.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/decoder_kernel.h"
#include "cpu/medusa_project_kernel.h"
#include "cpu/tree_attention_kernel.h"
#include "linear_trial.h"

namespace {

using namespace specdec;
using namespace specdec::layers;
using Memory = std::unique_ptr<Numbers>;

struct Kernels {
  const medusa::Kernel* products;
  const decoder::Kernel* rows;
  const attention::Kernel* attention;
};

class Trial {
 public:
  Trial(Element element, const Kernels& kernels) : element_(element), item_(bytes_of(element)), kernels_(kernels) {
    const int64_t rows = batch_ * nodes_, capacity = 40 + nodes_, num_slots = batch_ + 2 * has_slots_;
    for (int64_t b = 0; b < batch_; ++b) {
      lengths_.push_back(static_cast<int32_t>(below(41)));
      slots_.push_back(static_cast<int32_t>(num_slots - 1 - b));
      grow_tree();
      const attention::MaskView mask{mask_.data() + b * nodes_, 1, 1, static_cast<int32_t>(nodes_)};
      plans_.push_back(std::make_unique<attention::Planner>(mask, lengths_[b]));
    }
    cos_ = numbers(nodes_ * dim_), sin_ = numbers(nodes_ * dim_);
    const int64_t columns[] = {width_, width_, heads() * dim_, q_heads_ * dim_, width_, inner_};
    Memory* const buffers[] = {&hidden_, &normed_, &qkv_, &attended_, &middle_, &gated_};
    for (int i = 0; i < 6; ++i) *buffers[i] = numbers(rows * columns[i]);
    lse_.resize(rows * q_heads_);
    const int64_t cache = num_slots * capacity * kv_heads_ * dim_;
    for (int i = 0; i < kLayers; ++i) {
      caches_.push_back(numbers(cache)), caches_.push_back(numbers(cache));
      layers_.push_back(draw_layer(i, num_slots, capacity));
    }
    before_ = state();
  }

  void check() {
    run_stages();
    const std::vector<char> expected = state();
    for (const int64_t workers : {1, 2, 3, 7}) {
      run(workers, machine_of(kernels_.products, workers));
      require(state() == expected, "threads change the layers");
    }
    run(3, {kernels_.products, 3, [](int64_t workers, const std::function<void(int64_t)>& body) {
              for (int64_t i = 0; i < workers; ++i) body(i);
            }});
    require(state() == expected, "threads that come late change the layers");
  }

 private:
  static constexpr int kLayers = 2;

  int64_t heads() const { return q_heads_ + 2 * kv_heads_; }
  Memory numbers(int64_t count) const { return std::make_unique<Numbers>(element_, count); }
  const char* weight(int64_t count) {
    weights_.push_back(numbers(count));
    return weights_.back()->data();
  }

  void grow_tree() {
    for (int64_t i = 0; i < nodes_; ++i) {
      const int64_t parents = i == 0 ? 0 : mask_[mask_.size() - 1 - below(i)];
      mask_.push_back(parents | int64_t{1} << i);
    }
  }

  Layer draw_layer(int index, int64_t num_slots, int64_t capacity) {
    Layer layer{};
    const int64_t q = q_heads_ * dim_, kv = kv_heads_ * dim_;
    const int64_t counts[] = {q, kv, kv, width_, inner_, inner_, width_};
    for (int i = 0; i < kNumProjections; ++i) {
      const int64_t width = i == kO ? q : i == kDown ? inner_ : width_;
      layer.matrices[i] = {weight(counts[i] * width), width * item_, counts[i], biased_ ? weight(counts[i]) : nullptr};
    }
    layer.attention_norm = {weight(width_), 1e-5}, layer.mlp_norm = {weight(width_), 1e-5};
    decoder::Write& write = layer.write;
    const int64_t row = kv * item_, head = dim_ * item_;
    write.qkv = {qkv_->data(), {nodes_ * heads() * head, heads() * head, head}};
    write.keys = {caches_[2 * index]->data(), {capacity * row, row, head}};
    write.values = {caches_[2 * index + 1]->data(), {capacity * row, row, head}};
    if (below(4)) write.angles = {cos_->data(), sin_->data(), {0, head}, dim_};
    if (below(2)) write.q_norm = {weight(dim_), 1e-5}, write.k_norm = {weight(dim_), 1e-5};
    write.lengths = lengths_.data(), write.length_stride = 1;
    write.slots = has_slots_ ? slots_.data() : nullptr, write.slot_stride = 1;
    write.num_nodes = nodes_, write.num_q_heads = q_heads_, write.num_kv_heads = kv_heads_;
    write.head_dim = dim_, write.head_bytes = head;
    write.num_slots = num_slots, write.capacity = capacity;
    attention::Problem& p = layer.problem;
    p.q = qkv_->data(), p.out = attended_->data(), p.lse = lse_.data();
    for (int i = 0; i < 3; ++i) p.q_strides[i] = write.qkv.strides[i];
    p.k = {write.keys.data, capacity * row, row, head}, p.v = {write.values.data, capacity * row, row, head};
    p.q_element = p.cache_element = element_;
    p.block_table = write.slots, p.table_strides[0] = 1, p.page_size = capacity;
    p.num_nodes = static_cast<int32_t>(nodes_), p.num_q_heads = static_cast<int32_t>(q_heads_);
    p.group_size = static_cast<int32_t>(q_heads_ / kv_heads_);
    p.qk_dim = p.v_dim = static_cast<int32_t>(dim_);
    p.scale = 1 / std::sqrt(static_cast<double>(dim_));
    p.window = below(2) ? 1 + below(50) : 0;
    return layer;
  }

  // Hidden states and caches: all that a step changes.
  std::vector<char> state() const {
    std::vector<char> bytes;
    const auto add = [&](const Memory& m) {
      bytes.insert(bytes.end(), m->data(), m->data() + m->values.size() * item_);
    };
    add(hidden_);
    for (const Memory& cache : caches_) add(cache);
    return bytes;
  }

  void start_over() {
    const char* from = before_.data();
    const auto take = [&](const Memory& m) {
      std::memcpy(m->data(), from, m->values.size() * item_);
      from += m->values.size() * item_;
    };
    take(hidden_);
    for (const Memory& cache : caches_) take(cache);
  }

  void run(int64_t workers, const medusa::Machine& machine) {
    start_over();
    const int64_t widest = std::max({width_, inner_, q_heads_ * dim_});
    const medusa::Bytes operands(kernels_.products->operand_bytes((batch_ * nodes_ + 63) / 64 * 64, widest));
    std::vector<std::unique_ptr<attention::Schedule>> schedules;
    for (Layer& layer : layers_) {
      schedules.push_back(
          std::make_unique<attention::Schedule>(layer.problem, *kernels_.attention, plans_, machine.num_threads));
      layer.schedule = schedules.back().get();
    }
    const Step step{element_,
                    batch_ * nodes_,
                    width_,
                    {hidden_->data(), normed_->data(), qkv_->data(), attended_->data(), middle_->data(), gated_->data(),
                     operands.data()},
                    layers_,
                    kernels_.products,
                    kernels_.rows};
    const Stages stages(Worker::kStagesPerLayer * kLayers, workers);
    machine.run(workers, [&](int64_t worker) {
      attention::Workspace workspace;
      Worker(step, stages, worker).run(&workspace);
    });
  }

  // The stages by themselves, each on one thread.
  void run_stages() {
    start_over();
    attention::Workspace workspace;
    for (const Layer& layer : layers_) {
      normalise(hidden_, layer.attention_norm);
      multiply(layer, {kQ, kK, kV}, normed_, qkv_);
      for (int64_t i = 0; i < batch_ * nodes_; ++i) layer.write.node(*kernels_.rows, i);
      attention::Schedule(layer.problem, *kernels_.attention, plans_, 1).work(&workspace);
      multiply(layer, {kO}, attended_, middle_, hidden_.get());
      normalise(middle_, layer.mlp_norm);
      multiply(layer, {kGate, kUp}, normed_, gated_);
      multiply(layer, {kDown}, gated_, hidden_, middle_.get());
    }
  }

  void normalise(const Memory& from, const decoder::Norm& norm) {
    for (int64_t i = 0; i < batch_ * nodes_; ++i) {
      kernels_.rows->rms_norm(from->data(i * width_), norm, width_, normed_->data(i * width_));
    }
  }

  void multiply(const Layer& layer, const std::vector<Projection>& which, const Memory& from, const Memory& to,
                const Numbers* residual = nullptr) {
    linear::Call call{};
    const int64_t rows = batch_ * nodes_;
    call.element = element_, call.is_gated = which[0] == kGate;
    call.width = static_cast<int64_t>(from->values.size()) / rows;
    call.out = to->data(), call.out_stride = static_cast<int64_t>(to->values.size()) / rows * item_;
    for (const Projection i : which) call.matrices.push_back(layer.matrices[i]);
    for (int64_t row = 0; row < rows; ++row) {
      call.rows.push_back(from->data(row * call.width));
      if (residual) call.residual.push_back(residual->data(row * width_));
    }
    const medusa::Bytes operands(kernels_.products->operand_bytes((rows + 63) / 64 * 64, call.width));
    linear::Run(*kernels_.products, call, operands.data()).run(machine_of(kernels_.products, 1));
  }

  const Element element_;
  const int64_t item_;
  const Kernels kernels_;
  const int64_t batch_ = 1 + below(3), nodes_ = pick({1, 2, 5, 9, 40}), kv_heads_ = 1 + below(2);
  const int64_t q_heads_ = kv_heads_ * (1 + below(3)), dim_ = pick({2, 8, 18, 32});
  const int64_t width_ = pick({3, 17, 48, 70}), inner_ = pick({5, 33, 100});
  const bool has_slots_ = below(2), biased_ = below(2);
  std::vector<int32_t> lengths_, slots_;
  std::vector<int64_t> mask_;
  std::vector<std::unique_ptr<attention::Planner>> plans_;
  Memory cos_, sin_, hidden_, normed_, qkv_, attended_, middle_, gated_;
  std::vector<float> lse_;
  std::vector<Memory> caches_, weights_;
  std::vector<Layer> layers_;
  std::vector<char> before_;
};

}  // namespace

// One arithmetic for each build: the kernels take long to compile, and have drivers of their own.
int main() {
#if defined(__AVX512BF16__)
  constexpr Element element = Element::kBFloat16;
  const medusa::Kernel* const products = medusa::kernel_for<medusa::PairArithmetic, BFloat16>();
  const attention::Kernel* const attend = attention::kernel_of<attention::PairArithmetic>();
#else
  constexpr Element element = Element::kFloat;
  const medusa::Kernel* const products = medusa::kernel_for<medusa::SingleArithmetic<FloatVec>, float>();
  const attention::Kernel* const attend = attention::kernel_of<attention::FmaArithmetic<FloatVec>>();
#endif
  for (int i = 0; i < 20; ++i) Trial(element, {products, decoder::kernel_of(element), attend}).check();
  std::printf("ok\n");
}
