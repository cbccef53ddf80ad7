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
  bool is_even;  // all rows are one stride apart

  void list(const Problem& p, const Plan& plan, const Task& task, const Cluster& cluster, int64_t first_key,
            int32_t hidden, const char* zeros) {
    const int32_t num_prefix = cluster.num_keys - cluster.num_nodes;
    fill(0, hidden, zeros);
    is_even = hidden == 0 && num_prefix == kChunk;
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
      is_even = is_even && stop == kChunk && begin == 0;
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

template <class A>
class PackedChunk {
  using Operand = typename A::Operand;
  static constexpr int kPer = A::kPerStep;

 public:
  PackedChunk(const Problem& problem, int64_t ldq, int64_t ldv, Carver* carver)
      : p_(problem),
        element_bytes_(bytes_of(problem.cache_element)),
        ldv_(ldv),
        packed_keys_(carver->take<Operand>(kChunk * ldq)),
        packed_values_(carver->take<Operand>(kChunk / kPer * ldv)),
        zeros_(carver->take<char>(zero_bytes())) {}

  const Operand* keys() const { return packed_keys_; }
  const Operand* values() const { return values_; }
  int64_t value_stride() const { return value_stride_; }  // of a step
  int32_t num_keys() const { return num_keys_; }
  int32_t hidden() const { return hidden_; }

  void start() { std::memset(zeros_, 0, zero_bytes()); }

  // The first `common` keys are packed already; the first `hidden` are seen by nobody. Values that one tile of rows
  // will read once stay where they are, if they can.
  void load(const Plan& plan, const Task& task, const Cluster& cluster, int64_t first_key, int32_t hidden,
            int32_t common, int32_t num_rows) {
    num_keys_ = cluster.num_keys;
    hidden_ = hidden;
    rows_.list(p_, plan, task, cluster, first_key, hidden, zeros_);
    values_ = packed_values_;
    value_stride_ = ldv_;
    const bool in_place = num_rows <= kTileRows && rows_.is_even && p_.v_dim == ldv_;
    pack(common, in_place);
  }

  // The chunk behind is fetched while this one is worked on: while it is packed when it has few tiles, else by calls of
  // fetch_next between its tiles, so that memory is neither waited for nor idle.
  void list_next(const Plan& plan, const Task& task, int64_t first_key, int32_t tiles) {
    constexpr int32_t kFewTiles = 4;
    next_.list(p_, plan, task, {0, 0, kChunk, 0, nullptr, 0}, first_key, 0, zeros_);
    fetches_packing_ = tiles < kFewTiles;
    next_per_call_ = (kChunk + tiles - 1) / tiles;
    next_key_ = fetches_packing_ ? kChunk : 0;
  }
  void list_no_next() {
    fetches_packing_ = false;
    next_key_ = kChunk;
  }

  void fetch_next() {
    const int32_t end = smaller(next_key_ + next_per_call_, kChunk);
    for (; next_key_ < end; ++next_key_) {
      fetch(next_.k[next_key_], p_.qk_dim);
      fetch(next_.v[next_key_], p_.v_dim);
    }
  }

 private:
  int64_t zero_bytes() const { return larger(p_.qk_dim, p_.v_dim) * int64_t{8}; }

  void fetch(const char* row, int32_t dim) const {
    for (int64_t i = 0; i < dim * element_bytes_; i += 64) __builtin_prefetch(row + i, 0, 2);
  }

  void pack(int32_t common, bool in_place) {
    if constexpr (sizeof(typename A::Real) == 8) {
      if (p_.cache_element == Element::kDouble) pack_as<double>(common, in_place);
    } else if constexpr (kPer == 2) {
      if (p_.cache_element == Element::kBFloat16) pack_as<BFloat16>(common, false);
    } else {
      if (p_.cache_element == Element::kFloat) pack_as<float>(common, in_place);
      if (p_.cache_element == Element::kBFloat16) pack_as<BFloat16>(common, false);
      if (p_.cache_element == Element::kHalf) pack_as<Half>(common, false);
    }
    if (p_.cache_element == Element::kFloat8) pack_as<Float8>(common, false);
    if (p_.cache_element == Element::kInt8) pack_as<int8_t>(common, false);
  }

  template <class Stored>
  void pack_as(int32_t common, bool in_place) {
    for (int32_t i = common / A::kLanes * A::kLanes; i < num_keys_; i += A::kLanes) {
      if (fetches_packing_) {
        for (int32_t j = i; j < i + A::kLanes; ++j) fetch(next_.k[j], p_.qk_dim);
      }
      A::template pack_keys<Stored>(rows_.k + i, p_.qk_dim, packed_keys_ + i);
    }
    if (in_place) {
      values_ = as<Operand>(rows_.v[0]);
      value_stride_ = p_.v.inner_stride / static_cast<int64_t>(sizeof(Operand));
      return;
    }
    for (int32_t i = common / kPer * kPer; i < num_keys_; i += kPer) {
      if (fetches_packing_) {
        for (int32_t j = i; j < i + kPer; ++j) fetch(next_.v[j], p_.v_dim);
      }
      A::template pack_values<Stored>(rows_.v + i, p_.v_dim, packed_values_ + i / kPer * ldv_);
    }
  }

  const Problem& p_;
  int64_t element_bytes_;
  int64_t ldv_;
  Operand* packed_keys_;
  Operand* packed_values_;
  char* zeros_;
  const Operand* values_ = nullptr;
  int64_t value_stride_ = 0;
  int32_t num_keys_ = 0;
  int32_t hidden_ = 0;
  KeyRows rows_;
  KeyRows next_;
  bool fetches_packing_ = false;
  int32_t next_key_ = kChunk;
  int32_t next_per_call_ = 0;
};

}  // namespace
}  // namespace attention
}  // namespace specdec
