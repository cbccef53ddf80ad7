// The stages of one call, torch-free: residual layers, projection, and what is kept of the logits.
//
// A stage is a list of tasks: some chunks of weight rows each, times all rows of states that want these weights.
// Threads take tasks in order; no result depends on who takes which.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "cpu/medusa_project.h"
#include "cpu/medusa_project_rank.h"

namespace specdec {
namespace medusa {

// Strides in bytes.
struct Call {
  Element element;
  int64_t batch;
  int64_t num_heads;
  int64_t num_layers;
  int64_t width;
  int64_t vocab;
  bool own_projection;
  bool include_base;
  const char* hidden;
  int64_t hidden_stride;
  const char* w_res;
  int64_t w_res_strides[3];  // head, layer, row
  const char* b_res;         // or null
  int64_t b_res_strides[2];  // head, layer
  const char* w_out;
  int64_t w_out_strides[2];  // head (0: shared), row

  int64_t num_outputs() const { return num_heads + include_base; }  // of a batch row
};

// Calls body(worker) for worker = 0 ... workers - 1, each on a thread of its own where there are enough.
using RunWorkers = std::function<void(int64_t workers, const std::function<void(int64_t)>& body)>;

struct Machine {
  const Kernel* kernel;
  int64_t num_threads;
  RunWorkers run;
};

// Uninitialised memory at the start of a cache line.
class Bytes {
 public:
  explicit Bytes(int64_t size) : data_(static_cast<char*>(::operator new(static_cast<size_t>(size), kLine))) {}
  char* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kLine); }
  };
  std::unique_ptr<char, Free> data_;
};

// Rows of states times rows of weights, for each group its own.
struct Products {
  struct Group {
    const char* const* rows;
    const char* weights;
  };
  std::vector<Group> groups;
  int64_t num_rows;  // of each group
  int64_t num_weights;
  int64_t weight_stride;
  int64_t width;
  Element element;

  int64_t num_chunks() const { return (num_weights + kChunk - 1) / kChunk; }
  // Weight rows of a task: narrow ones in numbers, since a task's first rows are not fetched ahead.
  int64_t task_size() const {
    constexpr int64_t kTaskBytes = 1 << 20;
    return kChunk * std::max<int64_t>(1, kTaskBytes / (kChunk * width * bytes_of(element)));
  }
  int64_t tasks_per_group() const { return (num_weights + task_size() - 1) / task_size(); }
  int64_t num_tasks() const { return static_cast<int64_t>(groups.size()) * tasks_per_group(); }
  int64_t num_workers(int64_t num_threads) const {
    constexpr int64_t kBytesPerThread = 256 << 10;  // of weights; below, waking a thread costs more than it saves
    const int64_t bytes = static_cast<int64_t>(groups.size()) * num_weights * width * bytes_of(element);
    return std::max<int64_t>(1, std::min({num_threads, num_tasks(), bytes / kBytesPerThread}));
  }
};

// consume(worker, group, first, count, products): the products with weight rows first ... first + count - 1.
template <class Consume>
void multiply_all(const Machine& machine, const Products& p, const Consume& consume) {
  const Kernel& kernel = *machine.kernel;
  const int64_t bytes = (kernel.operand_bytes(p.num_rows, p.width) + 63) / 64 * 64;
  const Bytes operands(bytes * static_cast<int64_t>(p.groups.size()));
  const auto operands_of = [&](size_t group) {  // those of the group before if the rows are the same
    while (group > 0 && p.groups[group].rows == p.groups[group - 1].rows) --group;
    return operands.data() + bytes * static_cast<int64_t>(group);
  };
  for (size_t i = 0; i < p.groups.size(); ++i) {
    if (i > 0 && p.groups[i].rows == p.groups[i - 1].rows) continue;
    kernel.pack(p.groups[i].rows, p.num_rows, p.width, operands_of(i));
  }
  std::atomic<int64_t> next{0};
  machine.run(p.num_workers(machine.num_threads), [&](int64_t worker) {
    const Bytes products(p.num_rows * kChunk * product_bytes(p.element));
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < p.num_tasks();) {
      const int64_t group = task / p.tasks_per_group(), begin = task % p.tasks_per_group() * p.task_size();
      const int64_t end = std::min(begin + p.task_size(), p.num_weights);
      for (int64_t first = begin; first < end; first += kChunk) {
        const Weights weights{p.groups[group].weights + first * p.weight_stride, p.weight_stride,
                              std::min(kChunk, end - first), end - first, p.width};
        kernel.multiply(weights, operands_of(group), p.num_rows, products.data());
        consume(worker, group, first, weights.count, products.data());
      }
    }
  });
}

// The states that are projected: num_outputs x batch rows.
class States {
 public:
  States(const Machine& machine, const Call& call) : call_(call) {
    for (int64_t b = 0; b < call.batch; ++b) hidden_.push_back(call.hidden + b * call.hidden_stride);
    for (int64_t layer = 0; layer < call.num_layers; ++layer) run_layer(machine, layer);
    for (int64_t i = 0; i < call.num_outputs(); ++i) {
      const int64_t head = i - call.include_base;
      const char* const* const from = head < 0 ? hidden_.data() : rows_of(head);
      outputs_.insert(outputs_.end(), from, from + call.batch);
    }
  }
  const char* const* outputs() const { return outputs_.data(); }

 private:
  // Of a head, after the layers so far; all heads begin with the same.
  const char* const* rows_of(int64_t head) const {
    return rows_.empty() ? hidden_.data() : rows_.data() + head * call_.batch;
  }

  void run_layer(const Machine& machine, int64_t layer) {
    const int64_t item = bytes_of(call_.element), row_bytes = call_.width * item;
    Bytes after(call_.num_heads * call_.batch * row_bytes);
    Products p{{}, call_.batch, call_.width, call_.w_res_strides[2], call_.width, call_.element};
    for (int64_t head = 0; head < call_.num_heads; ++head) {
      const int64_t offset = head * call_.w_res_strides[0] + layer * call_.w_res_strides[1];
      p.groups.push_back({rows_of(head), call_.w_res + offset});
    }
    const int64_t stride = kChunk * product_bytes(call_.element);
    multiply_all(machine, p, [&](int64_t, int64_t head, int64_t first, int64_t count, const char* products) {
      const char* bias = call_.b_res;
      if (bias) bias += head * call_.b_res_strides[0] + layer * call_.b_res_strides[1] + first * item;
      for (int64_t b = 0; b < call_.batch; ++b) {
        machine.kernel->finish_layer(products + b * stride, bias, rows_of(head)[b] + first * item, count,
                                     after.data() + (head * call_.batch + b) * row_bytes + first * item);
      }
    });
    rows_.clear();
    for (int64_t i = 0; i < call_.num_heads * call_.batch; ++i) rows_.push_back(after.data() + i * row_bytes);
    states_ = std::move(after);
  }

  const Call& call_;
  std::vector<const char*> hidden_, rows_, outputs_;
  Bytes states_{0};
};

// The projection: a group a head with own weights, else one for all.
inline Products projection_of(const Call& call, const States& states) {
  Products p{{}, call.batch, call.vocab, call.w_out_strides[1], call.width, call.element};
  if (call.own_projection) {
    for (int64_t head = 0; head < call.num_heads; ++head) {
      p.groups.push_back({states.outputs() + head * call.batch, call.w_out + head * call.w_out_strides[0]});
    }
  } else {
    p.num_rows *= call.num_outputs();
    p.groups.push_back({states.outputs(), call.w_out});
  }
  return p;
}

// logits (batch, num_outputs, vocab), contiguous.
inline void project(const Machine& machine, const Call& call, char* logits) {
  const States states(machine, call);
  const Products p = projection_of(call, states);
  const int64_t item = bytes_of(call.element), stride = kChunk * product_bytes(call.element);
  multiply_all(machine, p, [&](int64_t, int64_t group, int64_t first, int64_t count, const char* products) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const int64_t at = group * p.num_rows + row, head = at / call.batch, b = at % call.batch;
      machine.kernel->store(products + row * stride, count,
                            logits + ((b * call.num_outputs() + head) * call.vocab + first) * item);
    }
  });
}

// Contiguous: (batch, num_outputs, k), the same, (batch, num_outputs).
struct Ranking {
  int64_t k;
  const int64_t* vocab_map;  // or null
  int64_t map_stride;        // elements
  float* values;
  int64_t* ids;
  float* lse;
};

class Ranks {
 public:
  Ranks(const Products& p, int64_t num_workers, int64_t k)
      : num_rows_(p.num_rows * static_cast<int64_t>(p.groups.size())),
        num_chunks_(p.num_chunks()),
        k_(k),
        keys_(num_workers * num_rows_ * k, kNoKey),
        sums_(num_chunks_ * num_rows_) {}

  int64_t* keys(int64_t worker, int64_t row) { return keys_.data() + (worker * num_rows_ + row) * k_; }
  LogSum& sum(int64_t chunk, int64_t row) { return sums_[chunk * num_rows_ + row]; }

  // The best keys of all workers, to worker 0.
  const int64_t* merged_keys(int64_t row) {
    int64_t* const best = keys(0, row);
    for (int64_t worker = 1; worker * num_rows_ * k_ < static_cast<int64_t>(keys_.size()); ++worker) {
      for (int64_t i = 0; i < k_; ++i) offer(keys(worker, row)[i], best, k_);
    }
    return best;
  }

  float log_sum_exp(int64_t row) {
    float shift = sum(0, row).shift;
    for (int64_t chunk = 1; chunk < num_chunks_; ++chunk) shift = std::max(shift, sum(chunk, row).shift);
    double total = 0;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      const LogSum& part = sum(chunk, row);
      total += part.sum * std::exp(static_cast<double>(part.shift) - shift);
    }
    return static_cast<float>(std::log(total) + shift);
  }

 private:
  int64_t num_rows_, num_chunks_, k_;
  std::vector<int64_t> keys_;
  std::vector<LogSum> sums_;
};

inline void project_topk(const Machine& machine, const Call& call, const Ranking& to) {
  const States states(machine, call);
  const Products p = projection_of(call, states);
  const int64_t stride = kChunk * product_bytes(call.element);
  Ranks ranks(p, p.num_workers(machine.num_threads), to.k);
  multiply_all(machine, p, [&](int64_t worker, int64_t group, int64_t first, int64_t count, const char* products) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const int64_t at = group * p.num_rows + row;
      ranks.sum(first / kChunk, at) =
          machine.kernel->rank(products + row * stride, count, first, ranks.keys(worker, at), to.k);
    }
  });
  for (int64_t row = 0; row < call.batch * call.num_outputs(); ++row) {
    const int64_t at = row % call.batch * call.num_outputs() + row / call.batch;
    const int64_t* const keys = ranks.merged_keys(row);
    for (int64_t i = 0; i < to.k; ++i) {
      const int64_t id = id_of(keys[i]);
      to.values[at * to.k + i] = value_of(keys[i]);
      to.ids[at * to.k + i] = to.vocab_map ? to.vocab_map[id * to.map_stride] : id;
    }
    to.lse[at] = ranks.log_sum_exp(row);
  }
}

}  // namespace medusa
}  // namespace specdec
