// The query rows of one task: their queries, positions and states, and how they come in and go out.
#pragma once

#include "cpu/tree_attention_softmax.h"

namespace specdec {
namespace attention {
namespace {

// Hands out aligned parts of the workspace; with a null base it only counts.
struct Carver {
  char* base;
  size_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* part = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return part;
  }
};

template <class A>
struct States {
  using Real = typename A::Real;

  int32_t num_rows = 0;
  int64_t ldv = 0;
  Real* max = nullptr;
  Real* sum = nullptr;
  Real* out = nullptr;

  States() = default;
  States(Carver* carver, int32_t rows, int64_t width)
      : num_rows(rows),
        ldv(width),
        max(carver->take<Real>(rows)),
        sum(carver->take<Real>(rows)),
        out(carver->take<Real>(rows * width)) {}

  RowState<Real> row(int32_t r) const { return {max + r, sum + r, out + r * ldv}; }

  void clear() const {
    for (int32_t r = 0; r < num_rows; ++r) max[r] = Softmax<A>::kNone;
    std::memset(sum, 0, num_rows * sizeof(Real));
    std::memset(out, 0, num_rows * ldv * sizeof(Real));
  }
};

template <class A>
class Rows {
  using Real = typename A::Real;
  using Vec = typename A::Vec;
  using Operand = typename A::Operand;

 public:
  Rows(const Problem& problem, int32_t num_rows, Carver* carver)
      : p_(problem),
        num_rows_(num_rows),
        num_steps_((problem.qk_dim + A::kPerStep - 1) / A::kPerStep),
        ldq_(round_up(num_steps_, A::kLanes)),
        ldv_(round_up(problem.v_dim, A::kLanes)),
        query_(carver->take<Operand>(num_rows * ldq_)),
        positions_(carver->take<int64_t>(num_rows)),
        lane_sums_(carver->take<Real>(int64_t{num_rows} * A::kLanes)),
        group_(carver, num_rows, ldv_),
        total_(carver, num_rows, ldv_) {}

  int32_t size() const { return num_rows_; }
  int32_t num_steps() const { return num_steps_; }
  int64_t ldq() const { return ldq_; }
  int64_t ldv() const { return ldv_; }
  const Operand* query(int32_t r) const { return query_ + r * ldq_; }
  int64_t position(int32_t r) const { return positions_[r]; }
  // The range of the rows' positions; of the longest, one more.
  int64_t first_position() const { return first_position_; }
  int64_t end_position() const { return end_position_; }
  Real* max(int32_t r) const { return group_.max + r; }
  Real* lane_sums(int32_t r) const { return lane_sums_ + r * A::kLanes; }
  Real* out(int32_t r) const { return group_.out + r * ldv_; }

  void read(const Plan& plan, const Task& task) {
    first_position_ = INT64_MAX;
    end_position_ = 0;
    for (int32_t r = 0; r < num_rows_; ++r) {
      const int32_t place = (task.row_begin + r) / p_.group_size;
      positions_[r] = plan.prefix + plan.depths[place];
      first_position_ = smaller(first_position_, positions_[r]);
      end_position_ = larger(end_position_, positions_[r] + 1);
      read_query(
          p_.q + task.batch * p_.q_strides[0] + plan.nodes[place] * p_.q_strides[1] + q_head(task, r) * p_.q_strides[2],
          query_ + r * ldq_);
    }
    has_total_ = false;
  }

  // A task of a split keeps each group where the merge will look for it.
  void open_group(const Task& task, int64_t group) {
    if (task.partials) group_ = partial(task, group);
    group_.clear();
    std::memset(lane_sums_, 0, num_rows_ * A::kLanes * sizeof(Real));
  }

  void close_group(const Task& task) {
    for (int32_t r = 0; r < num_rows_; ++r) group_.sum[r] = Vec::load(lane_sums(r)).sum();
    if (task.partials == nullptr) add_to_total(&group_);
  }

  void add_partials(const Task& task) {
    for (int64_t group = task.group_begin; group < task.group_end; ++group) {
      States<A> part = partial(task, group);
      add_to_total(&part);
    }
  }

  // Says that rows see nothing of the groups of this task that are not opened.
  void clear_partials(const Task& task) const {
    for (int64_t group = task.group_begin; group < task.group_end; ++group) {
      std::memset(partial(task, group).sum, 0, num_rows_ * sizeof(Real));
    }
  }

  size_t partial_bytes() const {
    Carver carver{nullptr};
    const States<A> states(&carver, num_rows_, ldv_);
    return carver.used;
  }

  void write(const Plan& plan, const Task& task) {
    if (!has_total_) total_.clear();
    for (int32_t r = 0; r < num_rows_; ++r) {
      const int64_t node = plan.nodes[(task.row_begin + r) / p_.group_size];
      const int64_t at = (task.batch * int64_t{p_.num_nodes} + node) * p_.num_q_heads + q_head(task, r);
      Real factor;
      static_cast<Real*>(p_.lse)[at] =
          finish_row<A>(total_.row(r), p_.sinks ? p_.sinks + q_head(task, r) : nullptr, &factor);
      if (p_.v_scale) factor *= static_cast<Real>(p_.v_scale[task.head]);
      write_out(total_.out + r * ldv_, factor, at * p_.v_dim);
    }
  }

 private:
  int64_t q_head(const Task& task, int32_t r) const {
    return int64_t{task.head} * p_.group_size + (task.row_begin + r) % p_.group_size;
  }

  States<A> partial(const Task& task, int64_t group) const {
    Carver carver{static_cast<char*>(task.partials) + group * partial_bytes()};
    return States<A>(&carver, num_rows_, ldv_);
  }

  void add_to_total(States<A>* part) {
    if (!has_total_) {
      const States<A> spare = total_;
      total_ = *part;
      *part = spare;
      has_total_ = true;
      return;
    }
    for (int32_t r = 0; r < num_rows_; ++r) merge_row<A>(total_.row(r), part->row(r), ldv_);
  }

  void read_query(const char* row, Operand* to) const {
    if constexpr (A::kPerStep == 2) {
      A::pack_query(as<BFloat16>(row), p_.qk_dim, to);
    } else if constexpr (sizeof(Real) == 8) {
      A::pack_query(as<double>(row), p_.qk_dim, to);
    } else {
      if (p_.q_element == Element::kFloat) A::pack_query(as<float>(row), p_.qk_dim, to);
      if (p_.q_element == Element::kBFloat16) A::pack_query(as<BFloat16>(row), p_.qk_dim, to);
      if (p_.q_element == Element::kHalf) A::pack_query(as<Half>(row), p_.qk_dim, to);
    }
  }

  void write_out(const Real* row, Real factor, int64_t at) const {
    if constexpr (sizeof(Real) == 8) {
      write_as(row, factor, reinterpret_cast<double*>(p_.out) + at);
    } else {
      if (p_.q_element == Element::kFloat) write_as(row, factor, reinterpret_cast<float*>(p_.out) + at);
      if (p_.q_element == Element::kBFloat16) write_as(row, factor, reinterpret_cast<BFloat16*>(p_.out) + at);
      if (p_.q_element == Element::kHalf) write_as(row, factor, reinterpret_cast<Half*>(p_.out) + at);
    }
  }

  // Adding 0 turns -0 into 0: a sum of products may be either, by how many zeros it met.
  template <class T>
  void write_as(const Real* row, Real factor, T* to) const {
    for (int32_t d = 0; d < p_.v_dim; d += A::kLanes) {
      const Vec x = Vec::load(row + d) * Vec::all(factor) + Vec::all(0);
      x.store_some(to + d, p_.v_dim - d);
    }
  }

  const Problem& p_;
  int32_t num_rows_;
  int32_t num_steps_;
  int64_t ldq_;
  int64_t ldv_;
  Operand* query_;
  int64_t* positions_;
  Real* lane_sums_;
  States<A> group_;
  States<A> total_;
  bool has_total_ = false;
  int64_t first_position_ = 0;
  int64_t end_position_ = 0;
};

}  // namespace
}  // namespace attention
}  // namespace specdec
