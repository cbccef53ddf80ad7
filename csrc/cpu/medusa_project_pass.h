// The products of one call, torch-free: the root's block, residual layers, projection.
//
// A product is a list of tasks: some rows of weights each, times all rows of states that want them. Threads are woken
// once for all products (team.h), and memory is asked for the first weights of the next one while this one is waited
// for. No result depends on who takes which task.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "cpu/medusa_project_call.h"
#include "cpu/team.h"

namespace specdec {
namespace medusa {

// consume(worker, group, first, count, products): the products with weight rows first ... first + count - 1.
using Consume = std::function<void(int64_t, int64_t, int64_t, int64_t, const char*)>;

// Rows of states times rows of weights, for each group its own, and what becomes of it.
struct Product {
  struct Group {
    const char* const* rows;
    const char* weights;
  };
  std::vector<Group> groups;
  int64_t num_rows;  // of each group
  int64_t num_weights;
  int64_t weight_stride;
  int64_t width;
  int64_t task_rows;  // of weights
  Consume consume;
  char* operands = nullptr;

  int64_t num_groups() const { return static_cast<int64_t>(groups.size()); }
  int64_t tasks_per_group() const { return (num_weights + task_rows - 1) / task_rows; }
  int64_t num_tasks() const { return num_groups() * tasks_per_group(); }
  // Groups that differ in their weights alone share what is packed.
  bool is_shared() const { return groups.back().rows == groups.front().rows; }
  int64_t num_packed() const { return is_shared() ? 1 : num_groups(); }
  int64_t packed_bytes(const Kernel& kernel) const { return (kernel.operand_bytes(num_rows, width) + 63) / 64 * 64; }
  char* operands_of(const Kernel& kernel, int64_t group) const {
    return operands + (is_shared() ? 0 : group * packed_bytes(kernel));
  }
};

// Each product needs all of the one before it; the last one is the projection.
class Pass {
 public:
  Pass(const Machine& machine, const Call& call)
      : machine_(machine), kernel_(*machine.kernel), call_(call), item_(bytes_of(call.element)) {
    std::vector<const char*> hidden;
    for (int64_t b = 0; b < call.batch; ++b) hidden.push_back(call.hidden + b * call.hidden_stride);
    states_.push_back(std::move(hidden));
    if (call.root.embedding) add_root();
    for (int64_t layer = 0; layer < call.num_layers; ++layer) add_layer(layer);
    add_projection();
  }
  Pass(const Pass&) = delete;

  int64_t num_workers() const {
    constexpr int64_t kBytesPerThread = 256 << 10;  // of weights; below, waking a thread costs more than it saves
    int64_t bytes = 0, tasks = 0;
    for (const Product& p : products_) {
      bytes += p.num_groups() * p.num_weights * p.width * item_;
      tasks = std::max(tasks, p.num_tasks());
    }
    return std::max<int64_t>(1, std::min({machine_.num_threads, tasks, bytes / kBytesPerThread}));
  }

  // `consume` gets the products of the projection: a group a head with own weights, else one for all outputs. Rows of a
  // group are batch rows, of each output in turn.
  void run(const Consume& consume) {
    products_.back().consume = consume;
    int64_t operand_bytes = 0, num_rows = 0;
    for (const Product& p : products_) {
      operand_bytes += p.num_packed() * p.packed_bytes(kernel_);
      num_rows = std::max(num_rows, p.num_rows);
    }
    const Bytes operands(operand_bytes);
    char* place = operands.data();
    for (Product& p : products_) {
      p.operands = place;
      place += p.num_packed() * p.packed_bytes(kernel_);
    }
    const int64_t workers = num_workers();
    const Stages stages(2 * static_cast<int64_t>(products_.size()), workers);
    machine_.run(workers, [&](int64_t worker) {
      fetch_first(products_[0], worker, workers);
      Stages::Member member(stages, worker);
      const Bytes products(num_rows * product_stride());
      for (size_t i = 0; i < products_.size(); ++i) {
        const Product& p = products_[i];
        member.run(p.num_packed(), [&](int64_t group) { pack(p, group); });
        const auto fetch_next = [&] {
          if (i + 1 < products_.size()) fetch_first(products_[i + 1], worker, workers);
        };
        member.run(p.num_tasks(), [&](int64_t task) { multiply(p, task, worker, products.data()); }, fetch_next);
      }
    });
  }

  // Of the products with one row of states, in bytes.
  int64_t product_stride() const { return kChunk * product_bytes(call_.element); }

 private:
  static constexpr int64_t kTaskRows = 48;  // few enough that threads finish together
  static_assert(kTaskRows <= kChunk);

  struct Block {
    const char* const* x;
    const char* const* rows;  // what is multiplied: x, or more
    const char* weights;
    const char* bias;  // or null
  };

  void add_root() {
    const Root& root = call_.root;
    const int64_t row_bytes = call_.width * item_;
    const char* const* const x = rows_of(0);
    char* joined = add_states(call_.batch, 2 * row_bytes);
    for (int64_t b = 0; b < call_.batch; ++b, joined += 2 * row_bytes) {
      std::memcpy(joined, x[b], row_bytes);
      root.kernel->rms_norm(root.embedding + b * root.stride, {nullptr, kRootEps}, call_.width, joined + row_bytes);
    }
    add_blocks({{x, rows_of(0), root.weights, root.bias}}, root.weight_stride, 2 * call_.width);
  }

  void add_layer(int64_t layer) {
    std::vector<Block> blocks;
    for (int64_t head = 0; head < call_.num_heads; ++head) {
      const char* const weights = call_.w_res + head * call_.w_res_strides[0] + layer * call_.w_res_strides[1];
      const int64_t offset = head * call_.b_res_strides[0] + layer * call_.b_res_strides[1];
      blocks.push_back({rows_of(head), rows_of(head), weights, call_.b_res ? call_.b_res + offset : nullptr});
    }
    add_blocks(std::move(blocks), call_.w_res_strides[2], call_.width);
  }

  // x + SiLU(rows Wᵀ + b), for each block its own states.
  void add_blocks(std::vector<Block> blocks, int64_t weight_stride, int64_t width) {
    const int64_t row_bytes = call_.width * item_;
    Product p{{}, call_.batch, call_.width, weight_stride, width, kTaskRows, {}};
    for (const Block& block : blocks) p.groups.push_back({block.rows, block.weights});
    char* const after = add_states(p.num_groups() * call_.batch, row_bytes);
    p.consume = [this, after, row_bytes, blocks = std::move(blocks)](int64_t, int64_t group, int64_t first,
                                                                     int64_t count, const char* products) {
      const Block& block = blocks[group];
      const char* const bias = block.bias ? block.bias + first * item_ : nullptr;
      for (int64_t b = 0; b < call_.batch; ++b) {
        kernel_.finish_layer(products + b * product_stride(), bias, block.x[b] + first * item_, count,
                             after + (group * call_.batch + b) * row_bytes + first * item_);
      }
    };
    products_.push_back(std::move(p));
  }

  void add_projection() {
    const int64_t outputs = call_.num_outputs();
    for (int64_t i = 0; i < outputs; ++i) {
      const int64_t head = i - call_.include_base;
      const char* const* const rows = head < 0 ? states_.front().data() : rows_of(head);
      outputs_.insert(outputs_.end(), rows, rows + call_.batch);
    }
    const int64_t num_groups = call_.own_projection ? outputs : 1, num_rows = call_.batch * outputs / num_groups;
    Product p{{}, num_rows, call_.vocab, call_.w_out_strides[1], call_.width, kChunk, {}};
    for (int64_t i = 0; i < num_groups; ++i) {
      p.groups.push_back({outputs_.data() + i * num_rows, call_.w_out + i * call_.w_out_strides[0]});
    }
    products_.push_back(std::move(p));
  }

  // Makes room for rows, the newest states.
  char* add_states(int64_t count, int64_t row_bytes) {
    memory_.emplace_back(count * row_bytes);
    char* const data = memory_.back().data();
    std::vector<const char*> rows;
    for (int64_t i = 0; i < count; ++i) rows.push_back(data + i * row_bytes);
    states_.push_back(std::move(rows));
    return data;
  }

  // Of a head among the newest states; all heads begin with the same.
  const char* const* rows_of(int64_t head) const {
    const std::vector<const char*>& rows = states_.back();
    return rows.data() + (static_cast<int64_t>(rows.size()) == call_.batch ? 0 : head * call_.batch);
  }

  void fetch_first(const Product& p, int64_t worker, int64_t workers) const {
    constexpr int64_t kBytes = 16 << 10, kLine = 64;
    const int64_t task = worker * p.num_tasks() / workers;
    const int64_t group = task / p.tasks_per_group(), first = task % p.tasks_per_group() * p.task_rows;
    const int64_t row_bytes = std::min(p.width * item_, kBytes);
    const int64_t last = std::min(p.num_weights, first + kBytes / row_bytes);
    for (int64_t row = first; row < last; ++row) {
      const char* const data = p.groups[group].weights + row * p.weight_stride;
      for (int64_t i = 0; i < row_bytes; i += kLine) __builtin_prefetch(data + i, 0, 2);
    }
  }

  void pack(const Product& p, int64_t group) const {
    kernel_.pack(p.groups[group].rows, p.num_rows, p.width, p.operands_of(kernel_, group));
  }

  void multiply(const Product& p, int64_t task, int64_t worker, char* products) const {
    const int64_t group = task / p.tasks_per_group(), first = task % p.tasks_per_group() * p.task_rows;
    const int64_t rest = p.num_weights - first;
    const Weights weights{p.groups[group].weights + first * p.weight_stride, p.weight_stride,
                          std::min(p.task_rows, rest), rest, p.width};
    kernel_.multiply(weights, p.operands_of(kernel_, group), p.num_rows, products);
    p.consume(worker, group, first, weights.count, products);
  }

  const Machine& machine_;
  const Kernel& kernel_;
  const Call& call_;
  const int64_t item_;
  std::vector<std::vector<const char*>> states_;  // after each block, the hidden states first
  std::vector<const char*> outputs_;
  std::vector<Bytes> memory_;
  std::vector<Product> products_;
};

}  // namespace medusa
}  // namespace specdec
