// The walk of one task: chunk by chunk over the prefix, cluster by cluster over the tail. See docs/tree_attention.md.
#pragma once

#include "cpu/tree_attention_direct.h"

namespace specdec {
namespace attention {
namespace {

// Rows whose scores are kept at once: their scores and weights stay in the first-level cache beside the packed keys.
constexpr int kStrip = 4 * kTileRows;

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
        chunk_(problem, rows_.ldq(), rows_.ldv(), &carver),
        direct_(problem),
        scores_(carver.take<Real>(larger(kTileRows, kDirectRows) * kChunk)),
        weights_(carver.take<Operand>(kStrip * kSteps)),
        unfinished_(carver.take<Real>(kTileRows * rows_.ldv())),
        workspace_bytes_(carver.used) {}

  void start(const Plan& plan, const Task& task) {
    const bool is_half = p_.q_element == Element::kHalf || p_.q_element == Element::kBFloat16;
    const double key_scale = p_.k_scale ? p_.k_scale[task.head] : 1.0;
    const double scale = p_.scale * key_scale;
    softmax_ = {static_cast<Real>(scale * A::kUnit), static_cast<Real>(p_.softcap * A::kUnit),
                static_cast<Real>(scale / p_.softcap), static_cast<Real>(is_half ? 8 * A::kUnit : 0)};
    chunk_.start();
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
    is_whole_ = first_key_ + kChunk <= plan.prefix && window_begin(rows_.end_position() - 1) <= first_key_;
    const int64_t hidden = larger(window_begin(rows_.first_position()) - first_key_, int64_t{0});
    ahead_.stop();
    const bool has_next = is_whole_ && first_key_ + 2 * kChunk <= plan.prefix;
    if (is_whole_ && end - begin <= kDirectRows) {
      if (has_next) ahead_.start(p_, plan, task, first_key_ + kChunk, direct_.fetch_calls());
      return attend_directly(plan, task, begin, end - begin);
    }
    const int32_t tiles = (end - begin + kTileRows - 1) / kTileRows;
    if (has_next) ahead_.start(p_, plan, task, first_key_ + kChunk, PackedChunk<A>::kPackCalls + tiles);
    chunk_.load(plan, task, cluster, first_key_, static_cast<int32_t>(hidden), common, &ahead_);
    for (int32_t r = begin; r < end; r += kStrip) {
      const int32_t rows = smaller(kStrip, end - r);
      for_tiles(rows, [&](int32_t at, int32_t size) {
        ahead_.fetch();
        score_tile(r + at, size, at);
      });
      for_tiles(rows, [&](int32_t at, int32_t size) { weigh_tile(r + at, size, at); });
    }
  }

  void attend_directly(const Plan& plan, const Task& task, int32_t r, int32_t rows) {
    direct_.list(plan, task, first_key_);
    direct_.score(rows, rows_.query(r), rows_.ldq(), scores_, &ahead_);
    softmax_.whole(rows, scores_, weights_, rows_.max(r), rows_.lane_sums(r), factors_);
    direct_.weigh(rows, weights_, T::needed(rows, factors_), rows_.out(r), rows_.ldv(), &ahead_);
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

  // The keys of the chunk that a row sees.
  int32_t seen_begin(int32_t r) const {
    if (is_whole_) return 0;
    const int64_t begin = window_begin(rows_.position(r)) - first_key_;
    return static_cast<int32_t>(smaller(larger(begin, int64_t{0}), int64_t{kChunk}));
  }
  int32_t seen_end(int32_t r) const {
    if (is_whole_) return kChunk;
    return static_cast<int32_t>(smaller(rows_.position(r) + 1 - first_key_, int64_t{kChunk}));
  }

  void score_tile(int32_t r, int32_t rows, int32_t at) {
    int32_t most = 0;
    for (int32_t i = 0; i < rows; ++i) most = larger(most, seen_end(r + i));
    const int num_vecs = (most + A::kLanes - 1) / A::kLanes;
    T::score_rows(rows, num_vecs, rows_.query(r), rows_.ldq(), chunk_.keys(), rows_.num_steps(), scores_);
    if (is_whole_) {
      return softmax_.whole(rows, scores_, weights_ + at * kSteps, rows_.max(r), rows_.lane_sums(r), factors_ + at);
    }
    for (int32_t i = 0; i < rows; ++i) {
      factors_[at + i] = softmax_.weights(num_vecs, seen_begin(r + i), seen_end(r + i), scores_ + i * kChunk,
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
    typename T::Values x{};
    x.weights = weights_ + at * kSteps;
    x.values = chunk_.values();
    x.ldv = rows_.ldv();
    x.factors = T::needed(rows, factors_ + at);
    x.out = rows_.out(r);
    // Keys that nobody sees are packed as zeros.
    if (alike && (begin % kPer == 0 || begin == chunk_.hidden()) && (end % kPer == 0 || end == chunk_.num_keys())) {
      x.begin = begin / kPer;
      x.end = larger((end + kPer - 1) / kPer, x.begin);
      return T::template weigh_rows<false>(rows, x);
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
    together.sums = unfinished_;
    if (x.begin < x.end) T::template weigh_rows<true>(rows, together);
    for (int32_t i = 0; i < rows; ++i) {
      weigh_alone(x, i, larger(seen_begin(r + i), x.end * kPer), seen_end(r + i));
      finish_row(unfinished_ + i * rows_.ldv(), x.factors ? x.factors[i] : Real(1), rows_.out(r + i));
    }
  }

  void finish_row(const Real* sums, Real factor, Real* out) const {
    for (int64_t d = 0; d < rows_.ldv(); d += A::kLanes) {
      A::Vec::fma(A::Vec::load(out + d), A::Vec::all(factor), A::Vec::load(sums + d)).store(out + d);
    }
  }

  // Keys begin ... end - 1 of row i of a tile into its unfinished sums.
  void weigh_alone(typename T::Values x, int32_t i, int32_t begin, int32_t end) {
    if (begin >= end) return;
    x.weights += i * kSteps;
    x.sums = unfinished_ + i * rows_.ldv();
    if (begin % kPer) {
      T::weigh_half(x.weights, x.values, x.ldv, begin / kPer, true, x.sums);
      ++begin;
    }
    x.begin = begin / kPer;
    x.end = end / kPer;
    if (x.begin < x.end) T::template weigh_rows<true>(1, x);
    if (begin < end && end % kPer) T::weigh_half(x.weights, x.values, x.ldv, end / kPer, false, x.sums);
  }

  const Problem& p_;
  Rows<A> rows_;
  PackedChunk<A> chunk_;
  DirectChunk<A> direct_;
  Ahead ahead_;
  Real* scores_;
  Operand* weights_;
  Real* unfinished_;
  size_t workspace_bytes_;
  Real factors_[kStrip];
  Softmax<A> softmax_;
  int64_t first_key_;  // position of the chunk's first key
  bool is_whole_;      // all rows see all keys of the chunk
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
