// The keys and values of one chunk: where they lie, their packed form, and fetching the next chunk's ahead.
#pragma once

#include "cpu/tree_attention_rows.h"

namespace specdec {
namespace attention {
namespace {

// Addresses of the cache rows of a cluster; keys that nobody sees get a row of zeros.
struct KeyRows {
  const char* k[kChunk];
  const char* v[kChunk];

  void list(const Problem& p, const Plan& plan, const Task& task, const Cluster& cluster, int64_t first_key,
            int32_t hidden, const char* zeros) {
    const int32_t num_prefix = cluster.num_keys - cluster.num_nodes;
    fill(0, hidden, zeros);
    add_run(p, task, hidden, num_prefix, first_key + hidden);
    for (int32_t i = larger(hidden, num_prefix); i < cluster.num_keys; ++i) {
      add_run(p, task, i, i + 1, plan.prefix + cluster.nodes[i - num_prefix]);
    }
    fill(cluster.num_keys, kChunk, zeros);
  }

 private:
  void fill(int32_t begin, int32_t end, const char* row) {
    for (int32_t i = begin; i < end; ++i) k[i] = v[i] = row;
  }

  // Keys begin ... end - 1 have consecutive positions.
  void add_run(const Problem& p, const Task& task, int32_t begin, int32_t end, int64_t position) {
    int64_t outer = task.batch, inner = position;
    while (begin < end) {
      int32_t stop = end;
      if (p.block_table) {
        const int64_t page = position / p.page_size;
        outer = p.block_table[task.batch * p.table_strides[0] + page * p.table_strides[1]];
        inner = position - page * p.page_size;
        stop = static_cast<int32_t>(smaller<int64_t>(end, begin + p.page_size - inner));
      }
      const char* key = p.k.data + outer * p.k.outer_stride + inner * p.k.inner_stride + task.head * p.k.head_stride;
      const char* value = p.v.data + outer * p.v.outer_stride + inner * p.v.inner_stride + task.head * p.v.head_stride;
      position += stop - begin;
      for (; begin < stop; ++begin, key += p.k.inner_stride, value += p.v.inner_stride) {
        k[begin] = key;
        v[begin] = value;
      }
    }
  }
};

// The rows of the chunk behind the one that is worked on. Fetched a few at a time, between other work, so that memory
// is neither waited for nor idle.
class Ahead {
 public:
  void stop() { left_ = 0; }

  // To be fetched by `calls` calls.
  void start(const Problem& p, const Plan& plan, const Task& task, int64_t first_key, int32_t calls) {
    const int64_t bytes = bytes_of(p.cache_element);
    key_bytes_ = p.qk_dim * bytes;
    value_bytes_ = p.v_dim * bytes;
    rows_.list(p, plan, task, {0, 0, kChunk, 0, nullptr, 0}, first_key, 0, nullptr);
    left_ = kChunk;
    per_call_ = (kChunk + calls - 1) / calls;
  }

  SPECDEC_INLINE void fetch() {
    for (const int32_t end = larger(left_ - per_call_, 0); left_ > end; --left_) {
      fetch_row(rows_.k[kChunk - left_], key_bytes_);
      fetch_row(rows_.v[kChunk - left_], value_bytes_);
    }
  }

 private:
  static SPECDEC_INLINE void fetch_row(const char* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }

  KeyRows rows_;
  int64_t key_bytes_ = 0;
  int64_t value_bytes_ = 0;
  int32_t left_ = 0;
  int32_t per_call_ = 0;
};

// Calls f<T>() with T as the cache's elements are stored.
template <class A, class F>
SPECDEC_INLINE void with_stored(Element element, const F& f) {
  if constexpr (sizeof(typename A::Real) == 8) {
    if (element == Element::kDouble) f.template operator()<double>();
  } else {
    if (element == Element::kBFloat16) f.template operator()<BFloat16>();
    if constexpr (A::kPerStep == 1) {
      if (element == Element::kFloat) f.template operator()<float>();
      if (element == Element::kHalf) f.template operator()<Half>();
    }
  }
  if (element == Element::kFloat8) f.template operator()<Float8>();
  if (element == Element::kInt8) f.template operator()<int8_t>();
}

template <class A>
class PackedChunk {
  using Operand = typename A::Operand;
  static constexpr int kPer = A::kPerStep;

 public:
  PackedChunk(const Problem& problem, int64_t ldq, int64_t ldv, Carver* carver)
      : p_(problem),
        ldv_(ldv),
        keys_(carver->take<Operand>(kChunk * ldq)),
        values_(carver->take<Operand>(kChunk / kPer * ldv)),
        zeros_(carver->take<char>(zero_bytes())) {}

  const Operand* keys() const { return keys_; }
  const Operand* values() const { return values_; }
  int32_t num_keys() const { return num_keys_; }
  int32_t hidden() const { return hidden_; }

  void start() { std::memset(zeros_, 0, zero_bytes()); }

  // The first `common` keys are packed already; the first `hidden` are seen by nobody. Calls `ahead` kPackCalls times
  // when all keys are packed.
  void load(const Plan& plan, const Task& task, const Cluster& cluster, int64_t first_key, int32_t hidden,
            int32_t common, Ahead* ahead) {
    num_keys_ = cluster.num_keys;
    hidden_ = hidden;
    rows_.list(p_, plan, task, cluster, first_key, hidden, zeros_);
    with_stored<A>(p_.cache_element, [&]<class Stored>() { pack<Stored>(common, ahead); });
  }
  static constexpr int32_t kPackCalls = 2 * kChunk / A::kLanes;

 private:
  int64_t zero_bytes() const { return larger(p_.qk_dim, p_.v_dim) * int64_t{8}; }

  template <class Stored>
  void pack(int32_t common, Ahead* ahead) {
    for (int32_t i = common / A::kLanes * A::kLanes; i < num_keys_; i += A::kLanes) {
      ahead->fetch();
      for (int32_t d = 0; d < p_.qk_dim; d += A::kLanes * kPer) {
        typename A::OperandVec steps[A::kLanes];
        A::template load_keys<Stored>(rows_.k + i, d, p_.qk_dim, steps);
        Operand* const to = keys_ + static_cast<int64_t>(d / kPer) * kChunk + i;
        SPECDEC_UNROLL_LOOP
        for (int j = 0; j < A::kLanes; ++j) A::store(steps[j], to + j * kChunk);
      }
    }
    for (int32_t i = common / kPer * kPer; i < num_keys_; i += kPer) {
      if (i % A::kLanes == 0) ahead->fetch();
      Operand* const to = values_ + i / kPer * ldv_;
      for (int32_t d = 0; d < p_.v_dim; d += 2 * A::kLanes) {
        typename A::OperandVec values[2];
        A::template load_values<Stored>(rows_.v + i, d, p_.v_dim, values);
        A::store(values[0], to + d);
        if (d + A::kLanes < p_.v_dim) A::store(values[1], to + d + A::kLanes);
      }
    }
  }

  const Problem& p_;
  int64_t ldv_;
  Operand* keys_;
  Operand* values_;
  char* zeros_;
  int32_t num_keys_ = 0;
  int32_t hidden_ = 0;
  KeyRows rows_;
};

}  // namespace
}  // namespace attention
}  // namespace specdec
