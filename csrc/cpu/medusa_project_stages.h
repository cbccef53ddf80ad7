// What is kept of a call's logits, torch-free: all of them, or the best.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/medusa_project_pass.h"
#include "cpu/medusa_project_rank.h"

namespace specdec {
namespace medusa {

// Of each group of the projection.
inline int64_t rows_per_group(const Call& call) { return call.batch * (call.own_projection ? 1 : call.num_outputs()); }

// logits (batch, num_outputs, vocab), contiguous.
inline void project(const Machine& machine, const Call& call, char* logits) {
  const int64_t item = bytes_of(call.element), stride = kChunk * product_bytes(call.element);
  const int64_t num_rows = rows_per_group(call);
  const auto store = [&](int64_t, int64_t group, int64_t first, int64_t count, const char* products) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t at = group * num_rows + row, head = at / call.batch, b = at % call.batch;
      machine.kernel->store(products + row * stride, count,
                            logits + ((b * call.num_outputs() + head) * call.vocab + first) * item);
    }
  };
  Pass(machine, call).run(store);
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
  Ranks(const Call& call, int64_t num_workers, int64_t k)
      : num_rows_(call.batch * call.num_outputs()),
        num_chunks_((call.vocab + kChunk - 1) / kChunk),
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
  const int64_t stride = kChunk * product_bytes(call.element), num_rows = rows_per_group(call);
  Pass pass(machine, call);
  Ranks ranks(call, pass.num_workers(), to.k);
  const auto rank = [&](int64_t worker, int64_t group, int64_t first, int64_t count, const char* products) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t at = group * num_rows + row;
      ranks.sum(first / kChunk, at) =
          machine.kernel->rank(products + row * stride, count, first, ranks.keys(worker, at), to.k);
    }
  };
  pass.run(rank);
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
