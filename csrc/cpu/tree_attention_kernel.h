// The walk of one task: chunk by chunk over the prefix, cluster by cluster over the tail. See docs/tree_attention.md.
#pragma once

#include "cpu/tree_attention_rows.h"

namespace specdec {
namespace attention {
namespace {

// Rows whose scores are kept at once: their scores and weights stay in the first-level cache beside the packed keys.
constexpr int kStrip = 4 * kTileRows;

// Lists the addresses of the cache rows of a cluster; keys that nobody sees get a row of zeros.
class KeyRows {
 public:
  const char* k[kChunk];
  const char* v[kChunk];

  void list(const Problem& p, const Plan& plan, const Task& task, const Cluster& cluster, int64_t first_key,
            int32_t hidden, const char* zeros) {
    const int64_t k_head = task.head * p.k.head_stride, v_head = task.head * p.v.head_stride;
    const int32_t num_prefix = cluster.num_keys - cluster.num_nodes;
    Place place(p, task.batch);
    for (int32_t i = 0; i < kChunk; ++i) {
      if (i < hidden || i >= cluster.num_keys) {
        k[i] = v[i] = zeros;
        continue;
      }
      place.go(i < num_prefix ? first_key + i : plan.prefix + cluster.nodes[i - num_prefix]);
      k[i] = p.k.data + place.outer * p.k.outer_stride + place.inner * p.k.inner_stride + k_head;
      v[i] = p.v.data + place.outer * p.v.outer_stride + place.inner * p.v.inner_stride + v_head;
    }
  }

 private:
  // Where a position lies in the cache; a division only where a page ends.
  struct Place {
    Place(const Problem& problem, int64_t batch) : p(problem), outer(batch), batch_(batch) {}

    void go(int64_t position) {
      if (p.block_table == nullptr) {
        inner = position;
        return;
      }
      inner = position - start_;
      if (inner < 0 || inner >= p.page_size || start_ < 0) {
        const int64_t page = position / p.page_size;
        start_ = page * p.page_size;
        inner = position - start_;
        outer = p.block_table[batch_ * p.table_strides[0] + page * p.table_strides[1]];
      }
    }

    const Problem& p;
    int64_t outer;
    int64_t inner = 0;

   private:
    int64_t batch_;
    int64_t start_ = -1;
  };
};

template <class A>
class Walk {
  using Real = typename A::Real;
  using Operand = typename A::Operand;
  using T = Tiles<A>;
  static constexpr int kPer = A::kPerStep;
  static constexpr int kSteps = kChunk / kPer;

 public:
  Walk(const Problem& problem, int32_t num_rows, void* workspace)
      : Walk(problem, num_rows, Carver{static_cast<char*>(workspace)}) {}

  static size_t workspace_bytes(const Problem& problem, int32_t num_rows) {
    return Walk(problem, num_rows, nullptr).workspace_bytes_;
  }
  static size_t partial_bytes(const Problem& problem, int32_t num_rows) {
    return Walk(problem, num_rows, nullptr).rows_.partial_bytes();
  }

  void attend(const Plan& plan, const Task& task) {
    start(plan, task);
    if (task.partials) rows_.clear_partials(task);
    const int64_t first =
        larger(window_begin(rows_.first_position()) / kChunk, int64_t{task.group_begin} * kChunksPerGroup);
    const int64_t last = smaller((rows_.end_position() - 1) / kChunk, int64_t{task.group_end} * kChunksPerGroup - 1);
    const int64_t first_tail = plan.prefix / kChunk;
    for (int64_t chunk = first; chunk <= last; ++chunk) {
      if (chunk == first || chunk % kChunksPerGroup == 0) rows_.open_group(task, chunk / kChunksPerGroup);
      if (chunk < first_tail) {
        attend_cluster(plan, task, chunk, {0, 0, kChunk, 0, nullptr, 0}, 0, 0, rows_.size());
      } else {
        attend_tail(plan, task, chunk, static_cast<int32_t>(chunk - first_tail));
      }
      if (chunk == last || (chunk + 1) % kChunksPerGroup == 0) rows_.close_group(task);
    }
    if (task.partials == nullptr) rows_.write(plan, task);
  }

  void merge(const Plan& plan, const Task& task) {
    start(plan, task);
    rows_.add_partials(task);
    rows_.write(plan, task);
  }

 private:
  Walk(const Problem& problem, int32_t num_rows, Carver carver)
      : p_(problem),
        rows_(problem, num_rows, &carver),
        keys_(carver.take<Operand>(kChunk * rows_.ldq())),
        values_(carver.take<Operand>(kSteps * rows_.ldv())),
        scores_(carver.take<Real>(kStrip * kChunk)),
        weights_(carver.take<Operand>(kStrip * kSteps)),
        unfinished_(carver.take<Real>(kTileRows * rows_.ldv())),
        zeros_(carver.take<char>(zero_bytes())),
        workspace_bytes_(carver.used) {}

  int64_t zero_bytes() const { return larger(p_.qk_dim, p_.v_dim) * int64_t{8}; }

  void start(const Plan& plan, const Task& task) {
    const bool is_half = p_.q_element == Element::kHalf || p_.q_element == Element::kBFloat16;
    const double key_scale = p_.k_scale ? p_.k_scale[task.head] : 1.0;
    softmax_ = {static_cast<Real>(p_.scale * key_scale), static_cast<Real>(p_.softcap), Real(is_half ? 8 : 0)};
    std::memset(zeros_, 0, zero_bytes());
    rows_.read(plan, task);
  }

  int64_t window_begin(int64_t position) const {
    return p_.window > 0 && p_.window <= position ? position + 1 - p_.window : 0;
  }

  void attend_tail(const Plan& plan, const Task& task, int64_t chunk, int32_t tail) {
    int32_t common = 0;
    for (int32_t c = plan.first_cluster[tail]; c < plan.first_cluster[tail + 1]; ++c) {
      const Cluster& cluster = plan.clusters[c];
      common = smaller(common, cluster.num_common);
      const int64_t begin = larger(int64_t{cluster.begin} * p_.group_size - task.row_begin, int64_t{0});
      const int64_t end = smaller(int64_t{cluster.end} * p_.group_size - task.row_begin, int64_t{rows_.size()});
      if (begin >= end) continue;
      attend_cluster(plan, task, chunk, cluster, common, static_cast<int32_t>(begin), static_cast<int32_t>(end));
      common = kChunk;
    }
  }

  // Rows begin ... end - 1 over the keys of a cluster, of which the first `common` are packed already.
  void attend_cluster(const Plan& plan, const Task& task, int64_t chunk, const Cluster& cluster, int32_t common,
                      int32_t begin, int32_t end) {
    first_key_ = chunk * kChunk;
    num_keys_ = cluster.num_keys;
    hidden_ = static_cast<int32_t>(larger(window_begin(rows_.first_position()) - first_key_, int64_t{0}));
    key_rows_.list(p_, plan, task, cluster, first_key_, hidden_, zeros_);
    pack(common);
    for (int32_t r = begin; r < end; r += kStrip) {
      const int32_t rows = smaller(kStrip, end - r);
      for_tiles(rows, [&](int32_t at, int32_t size) { score_tile(r + at, size, at); });
      for_tiles(rows, [&](int32_t at, int32_t size) { weigh_tile(r + at, size, at); });
    }
  }

  // Tiles of nearly equal size.
  template <class F>
  static SPECDEC_INLINE void for_tiles(int32_t rows, const F& f) {
    int32_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int32_t at = 0; tiles > 0; --tiles) {
      const int32_t size = (rows - at + tiles - 1) / tiles;
      f(at, size);
      at += size;
    }
  }

  void pack(int32_t common) {
    if constexpr (sizeof(Real) == 8) {
      if (p_.cache_element == Element::kDouble) pack_as<double>(common);
    } else if constexpr (kPer == 2) {
      if (p_.cache_element == Element::kBFloat16) pack_as<BFloat16>(common);
    } else {
      if (p_.cache_element == Element::kFloat) pack_as<float>(common);
      if (p_.cache_element == Element::kBFloat16) pack_as<BFloat16>(common);
      if (p_.cache_element == Element::kHalf) pack_as<Half>(common);
    }
    if (p_.cache_element == Element::kFloat8) pack_as<Float8>(common);
    if (p_.cache_element == Element::kInt8) pack_as<int8_t>(common);
  }

  template <class Stored>
  void pack_as(int32_t common) {
    for (int32_t i = common / A::kLanes * A::kLanes; i < num_keys_; i += A::kLanes) {
      A::template pack_keys<Stored>(key_rows_.k + i, p_.qk_dim, keys_ + i);
    }
    for (int32_t i = common / kPer * kPer; i < num_keys_; i += kPer) {
      A::template pack_values<Stored>(key_rows_.v + i, p_.v_dim, values_ + i / kPer * rows_.ldv());
    }
  }

  // The keys of the chunk that a row sees.
  int32_t seen_begin(int32_t r) const {
    const int64_t begin = window_begin(rows_.position(r)) - first_key_;
    return static_cast<int32_t>(smaller(larger(begin, int64_t{0}), int64_t{kChunk}));
  }
  int32_t seen_end(int32_t r) const {
    return static_cast<int32_t>(smaller(rows_.position(r) + 1 - first_key_, int64_t{kChunk}));
  }

  void score_tile(int32_t r, int32_t rows, int32_t at) {
    int32_t most = 0;
    for (int32_t i = 0; i < rows; ++i) most = larger(most, seen_end(r + i));
    const int num_vecs = (most + A::kLanes - 1) / A::kLanes;
    T::score_rows(rows, num_vecs, rows_.query(r), rows_.ldq(), keys_, rows_.num_steps(), scores_ + at * kChunk);
    for (int32_t i = 0; i < rows; ++i) {
      factors_[at + i] = softmax_.weights(num_vecs, seen_begin(r + i), seen_end(r + i), scores_ + (at + i) * kChunk,
                                          weights_ + (at + i) * kSteps, rows_.max(r + i), rows_.lane_sums(r + i));
    }
  }

  // A tile takes together the steps that all its rows see. What one row sees beyond is its own affair: the others'
  // weights are 0 there, but 0 times a value that they must not see may be NaN.
  void weigh_tile(int32_t r, int32_t rows, int32_t at) {
    int32_t begin = seen_begin(r), end = seen_end(r);
    bool alike = true;
    for (int32_t i = 1; i < rows; ++i) {
      const int32_t row_begin = seen_begin(r + i), row_end = seen_end(r + i);
      alike = alike && row_begin == begin && row_end == end;
      begin = larger(begin, row_begin);
      end = smaller(end, row_end);
    }
    typename T::Values x{weights_ + at * kSteps, values_,     rows_.ldv(), 0, 0, nullptr, nullptr,
                         factors_ + at,          rows_.out(r)};
    // Keys that nobody sees are packed as zeros.
    if (alike && (begin % kPer == 0 || begin == hidden_) && (end % kPer == 0 || end == num_keys_)) {
      x.begin = begin / kPer;
      x.end = larger((end + kPer - 1) / kPer, x.begin);
      return T::weigh_rows(rows, x);
    }
    x.begin = (begin + kPer - 1) / kPer;
    x.end = end / kPer;
    if (x.begin > x.end) x.begin = x.end = kSteps;
    weigh_apart(x, r, rows);
  }

  // Steps x.begin ... x.end - 1 together, what is before and behind them row by row.
  void weigh_apart(const typename T::Values& x, int32_t r, int32_t rows) {
    std::memset(unfinished_, 0, rows * rows_.ldv() * sizeof(Real));
    for (int32_t i = 0; i < rows; ++i) {
      weigh_alone(x, i, seen_begin(r + i), smaller(seen_end(r + i), x.begin * kPer));
    }
    typename T::Values together = x;
    together.sums_in = together.sums_out = unfinished_;
    if (x.begin < x.end) T::weigh_rows(rows, together);
    for (int32_t i = 0; i < rows; ++i) {
      weigh_alone(x, i, larger(seen_begin(r + i), x.end * kPer), seen_end(r + i));
    }
    together.begin = together.end = 0;
    together.sums_out = nullptr;
    T::weigh_rows(rows, together);
  }

  // Keys begin ... end - 1 of row i of a tile into its unfinished sums.
  void weigh_alone(typename T::Values x, int32_t i, int32_t begin, int32_t end) {
    if (begin >= end) return;
    x.weights += i * kSteps;
    x.sums_in = x.sums_out = unfinished_ + i * rows_.ldv();
    if (begin % kPer) {
      T::weigh_half(x.weights, values_, x.ldv, begin / kPer, true, x.sums_out);
      ++begin;
    }
    x.begin = begin / kPer;
    x.end = end / kPer;
    if (x.begin < x.end) T::weigh_rows(1, x);
    if (begin < end && end % kPer) T::weigh_half(x.weights, values_, x.ldv, end / kPer, false, x.sums_out);
  }

  const Problem& p_;
  Rows<A> rows_;
  Operand* keys_;
  Operand* values_;
  Real* scores_;
  Operand* weights_;
  Real* unfinished_;
  char* zeros_;
  size_t workspace_bytes_;
  KeyRows key_rows_;
  Real factors_[kStrip];
  Softmax<A> softmax_;
  int64_t first_key_;  // position of the chunk's first key
  int32_t num_keys_;   // of the packed cluster
  int32_t hidden_;     // leading keys of the chunk that no row of the task sees
};

template <class A>
const Kernel* kernel_of() {
  static constexpr Kernel kKernel = {Walk<A>::workspace_bytes, Walk<A>::partial_bytes,
                                     [](const Problem& p, const Plan& plan, const Task& task, void* workspace) {
                                       Walk<A>(p, task.row_end - task.row_begin, workspace).attend(plan, task);
                                     },
                                     [](const Problem& p, const Plan& plan, const Task& task, void* workspace) {
                                       Walk<A>(p, task.row_end - task.row_begin, workspace).merge(plan, task);
                                     }};
  return &kKernel;
}

}  // namespace
}  // namespace attention
}  // namespace specdec
