#include "cpu/layers.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <map>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/empty.h"
#include "common/register.h"
#include "cpu/decoder_args.h"
#include "cpu/element_of.h"
#include "cpu/machine.h"
#include "cpu/tree_attention_args.h"

namespace specdec {
namespace layers {
namespace {

using Tensors = std::vector<Tensor>;

// Where the weights of a layer are, in the order of the schema.
constexpr int kAttentionNorm = 0, kMlpNorm = 5, kQueryNorm = 9, kKeyNorm = 10;
constexpr int kPlaces[kNumProjections] = {1, 2, 3, 4, 6, 7, 8};

struct Arguments {
  const Tensor& hidden;
  const Tensors& weights;
  const Tensors& biases;
  const std::vector<int64_t>& biased;  // the projections that have one
  const Tensors& caches;
  const std::vector<int64_t>& windows;
  const std::vector<int64_t>& rotated;
  double eps;

  int64_t num_layers() const { return static_cast<int64_t>(windows.size()); }
  int64_t weights_per_layer() const { return static_cast<int64_t>(weights.size()) / num_layers(); }
  const Tensor& weight(int64_t layer, int place) const { return weights[layer * weights_per_layer() + place]; }
  int64_t item() const { return static_cast<int64_t>(hidden.element_size()); }
};

void check_counts(const Arguments& a) {
  const size_t count = a.windows.size();
  STD_TORCH_CHECK(count >= 1 && (a.weights.size() == 9 * count || a.weights.size() == 11 * count),
                  "weights must be 9 or 11 for each of the layers");
  STD_TORCH_CHECK(a.caches.size() == 2 * count && a.rotated.size() == count, "caches must be two for each layer");
  STD_TORCH_CHECK(a.biases.size() == a.biased.size() * count, "biases must be as many as `biased` for each layer");
  for (const int64_t i : a.biased) STD_TORCH_CHECK(i >= 0 && i < kNumProjections, "biased must be projections");
  int64_t stride = 1;
  for (int64_t dim = a.hidden.dim() - 1; dim >= 0; --dim) {
    STD_TORCH_CHECK(a.hidden.size(dim) == 1 || a.hidden.stride(dim) == stride, "hidden must be contiguous");
    stride *= a.hidden.size(dim);
  }
}

linear::Matrix matrix_of(const Arguments& a, int64_t layer, int projection, int64_t rows, int64_t width) {
  const Tensor& weight = a.weight(layer, kPlaces[projection]);
  check_rows_like("weights", weight, a.hidden);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == rows && weight.size(1) == width, "weights must have shape (",
                  rows, ", ", width, ")");
  linear::Matrix matrix{static_cast<const char*>(weight.const_data_ptr()), weight.stride(0) * a.item(), rows, nullptr};
  for (size_t i = 0; i < a.biased.size(); ++i) {
    if (a.biased[i] != projection) continue;
    const Tensor& bias = a.biases[layer * a.biased.size() + i];
    check_rows_like("biases", bias, a.hidden);
    STD_TORCH_CHECK(bias.dim() == 1 && bias.size(0) == rows, "biases must have shape (", rows, ",)");
    matrix.bias = static_cast<const char*>(bias.const_data_ptr());
  }
  return matrix;
}

// The sizes of the layers, read from the first one.
struct Sizes {
  int64_t batch, num_nodes, width, num_q_heads, num_kv_heads, head_dim, inner;

  explicit Sizes(const Arguments& a) {
    const Tensor &cache = a.caches[0], &query = a.weight(0, kPlaces[kQ]), &gate = a.weight(0, kPlaces[kGate]);
    STD_TORCH_CHECK(a.hidden.dim() == 3 && cache.dim() == 4 && query.dim() == 2 && gate.dim() == 2,
                    "hidden must have 3 dimensions, caches 4, weights 2");
    batch = a.hidden.size(0), num_nodes = a.hidden.size(1), width = a.hidden.size(2);
    num_kv_heads = cache.size(2), head_dim = cache.size(3), inner = gate.size(0);
    STD_TORCH_CHECK(num_kv_heads >= 1 && head_dim >= 1 && query.size(0) % (num_kv_heads * head_dim) == 0 &&
                        query.size(0) >= 1 && width >= 1 && inner >= 1 && num_nodes >= 1,
                    "sizes do not fit together");
    num_q_heads = query.size(0) / head_dim;
  }
  int64_t num_rows() const { return batch * num_nodes; }
  int64_t num_heads() const { return num_q_heads + 2 * num_kv_heads; }
  int64_t count(int projection) const {
    const int64_t kv = num_kv_heads * head_dim;
    const int64_t counts[kNumProjections] = {num_q_heads * head_dim, kv, kv, width, inner, inner, width};
    return counts[projection];
  }
  int64_t width_into(int projection) const {
    return projection == kO ? num_q_heads * head_dim : projection == kDown ? inner : width;
  }
  int64_t widest() const { return std::max({width, inner, num_q_heads * head_dim}); }
};

// The problem of all layers but for the caches and the window.
void read_attention(const Sizes& s, const Tensor& qkv, const Tensor& tree_mask, const Tensor& prefix_len,
                    const std::optional<Tensor>& slots, double scale, attention::Call* call) {
  attention::Problem& p = call->problem;
  p.q_element = p.cache_element = floating_element_of("hidden", qkv);
  STD_TORCH_CHECK(s.num_nodes < (1 << 20) && s.num_heads() < (1 << 20) && s.head_dim < (1 << 20),
                  "sizes are too large");
  call->batch = s.batch;
  p.num_nodes = static_cast<int32_t>(s.num_nodes);
  p.num_q_heads = static_cast<int32_t>(s.num_q_heads);
  p.group_size = static_cast<int32_t>(s.num_q_heads / s.num_kv_heads);
  p.qk_dim = p.v_dim = static_cast<int32_t>(s.head_dim);
  p.scale = scale;
  p.q = static_cast<const char*>(qkv.const_data_ptr());
  for (int i = 0; i < 3; ++i) p.q_strides[i] = decoder::stride_of(qkv, i);
  if (slots) {
    p.block_table = static_cast<const int32_t*>(slots->const_data_ptr());
    p.table_strides[0] = slots->stride(0);
  }
  read_structure(qkv, tree_mask, prefix_len, call);
}

Layer layer_of(const Arguments& a, const Sizes& s, int64_t index, const decoder::Write& write,
               const attention::Problem& problem) {
  Layer layer{};
  layer.attention_norm = decoder::norm_of("norms", a.weight(index, kAttentionNorm), a.eps, s.width, a.hidden);
  layer.mlp_norm = decoder::norm_of("norms", a.weight(index, kMlpNorm), a.eps, s.width, a.hidden);
  for (int i = 0; i < kNumProjections; ++i) layer.matrices[i] = matrix_of(a, index, i, s.count(i), s.width_into(i));
  layer.write = write;
  layer.problem = problem;
  const Tensor &k = a.caches[2 * index], &v = a.caches[2 * index + 1];
  for (const Tensor* cache : {&k, &v}) {
    check_rows_like("caches", *cache, a.hidden);
    STD_TORCH_CHECK(cache->dim() == 4 && cache->size(0) == write.num_slots && cache->size(1) == write.capacity &&
                        cache->size(2) == s.num_kv_heads && cache->size(3) == s.head_dim,
                    "caches must be alike");
  }
  const auto heads = [](const Tensor& t) {
    return decoder::Heads{static_cast<char*>(t.mutable_data_ptr()),
                          {decoder::stride_of(t, 0), decoder::stride_of(t, 1), decoder::stride_of(t, 2)}};
  };
  layer.write.keys = heads(k);
  layer.write.values = heads(v);
  if (!a.rotated[index]) layer.write.angles = {};
  if (a.weights_per_layer() == 11) {
    layer.write.q_norm = decoder::norm_of("q_norm", a.weight(index, kQueryNorm), a.eps, s.head_dim, a.hidden);
    layer.write.k_norm = decoder::norm_of("k_norm", a.weight(index, kKeyNorm), a.eps, s.head_dim, a.hidden);
  }
  layer.problem.k = attention::view_cache(k);
  layer.problem.v = attention::view_cache(v);
  layer.problem.page_size = write.capacity;
  STD_TORCH_CHECK(a.windows[index] >= 0, "windows must not be negative");
  layer.problem.window = a.windows[index];
  return layer;
}

void run(const Step& step, int64_t layer_bytes, const medusa::Machine& machine) {
  constexpr int64_t kBytesPerThread = 512 << 10;  // of a layer's weights; below, waiting costs more than it saves
  const int64_t useful = std::max(layer_bytes / kBytesPerThread, step.num_rows * layer_bytes / (kBytesPerThread << 5));
  const int64_t workers = std::max<int64_t>(1, std::min(machine.num_threads, useful));
  const Stages stages(Worker::kStagesPerLayer * static_cast<int64_t>(step.layers.size()), workers);
  machine.run(workers, [&](int64_t worker) {
    thread_local attention::Workspace workspace;
    Worker(step, stages, worker).run(&workspace);
  });
}

void decoder_layers_cpu(Tensor hidden, Tensors weights, std::optional<Tensor> cos, std::optional<Tensor> sin,
                        Tensors caches, Tensor tree_mask, Tensor prefix_len, Tensors biases,
                        std::vector<int64_t> biased, std::optional<Tensor> slots, std::vector<int64_t> windows,
                        std::vector<int64_t> rotated, double scale, double eps) {
  const Arguments a{hidden, weights, biases, biased, caches, windows, rotated, eps};
  check_counts(a);
  check_rows_like("hidden", hidden, hidden);
  const Sizes s(a);
  if (s.batch == 0) return;
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(hidden.get(), &dtype));
  Tensor qkv = empty_cpu({s.batch, s.num_nodes, s.num_heads(), s.head_dim}, dtype);
  decoder::Write write =
      decoder::places_of(qkv, prefix_len, slots, caches[0].size(0), caches[0].size(1), s.num_kv_heads);
  write.qkv = decoder::heads_of("qkv", qkv, qkv, s.batch);
  write.angles = decoder::angles_of(cos, sin, qkv);
  for (int64_t i = 0; i < s.num_rows(); ++i) {
    STD_TORCH_CHECK(write.fits(i), "prefix_len + T must be within the cache, slots be rows of it");
  }
  attention::Call call;
  read_attention(s, qkv, tree_mask, prefix_len, slots, scale, &call);
  const Element element = call.problem.q_element;
  const int64_t row_bytes = s.num_rows() * bytes_of(element);
  const medusa::Machine machine = medusa::this_machine(element);
  const medusa::Bytes normed(row_bytes * s.width), attended(row_bytes * s.count(kQ)), middle(row_bytes * s.width),
      gated(row_bytes * s.inner), lse(s.num_rows() * s.num_q_heads * 8),
      operands(machine.kernel->operand_bytes((s.num_rows() + 63) / 64 * 64, s.widest()));
  call.problem.out = attended.data();
  call.problem.lse = lse.data();

  std::vector<std::unique_ptr<attention::Planner>> plans;
  for (int64_t b = 0; b < s.batch; ++b) {
    plans.push_back(std::make_unique<attention::Planner>(call.mask_of(b), call.prefix(b)));
  }
  attention::write_padding(call, plans, bytes_of(element));
  Step step{element,
            s.num_rows(),
            s.width,
            {static_cast<char*>(hidden.mutable_data_ptr()), normed.data(), static_cast<char*>(qkv.mutable_data_ptr()),
             attended.data(), middle.data(), gated.data(), operands.data()},
            {},
            machine.kernel,
            &decoder::find_kernel(element)};
  const attention::Kernel& attention_kernel = attention::find_kernel(element, element);
  std::map<int64_t, std::unique_ptr<attention::Schedule>> schedules;  // by window
  step.layers.reserve(windows.size());
  for (int64_t i = 0; i < a.num_layers(); ++i) {
    step.layers.push_back(layer_of(a, s, i, write, call.problem));
    Layer& layer = step.layers.back();
    auto& schedule = schedules[layer.problem.window];
    if (!schedule) {
      schedule = std::make_unique<attention::Schedule>(layer.problem, attention_kernel, plans, machine.num_threads);
    }
    layer.schedule = schedule.get();
  }
  int64_t layer_bytes = 0;
  for (int i = 0; i < kNumProjections; ++i) layer_bytes += s.count(i) * s.width_into(i) * bytes_of(element);
  run(step, layer_bytes, machine);
}

}  // namespace
}  // namespace layers
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  SPECDEC_IMPL(m, "decoder_layers_", specdec::layers::decoder_layers_cpu);
}
