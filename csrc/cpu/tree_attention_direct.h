// The two products of attention over one whole chunk for few rows, straight from the cache: packing would cost more
// than the products. The sums take the same steps in the same order as those of tree_attention_tile.h.
#pragma once

#include "cpu/tree_attention_chunk.h"

namespace specdec {
namespace attention {
namespace {

// Vectors of sums and operands of so many rows fit the registers.
#if defined(__AVX512F__)
constexpr int kDirectRows = 8;
#else
constexpr int kDirectRows = 4;
#endif

template <class A>
class DirectChunk {
  using Real = typename A::Real;
  using Vec = typename A::Vec;
  using Operand = typename A::Operand;
  using OperandVec = typename A::OperandVec;
  static constexpr int kLanes = A::kLanes;
  static constexpr int kSteps = kChunk / A::kPerStep;
  static constexpr int kFetchSteps = kSteps / 4;

 public:
  explicit DirectChunk(const Problem& problem) : p_(problem) {}

  // How often score and weigh together call Ahead::fetch.
  int32_t fetch_calls() const {
    const int32_t score_calls = (p_.qk_dim + kDim - 1) / kDim * (kChunk / kLanes);
    return score_calls + (p_.v_dim + 2 * kLanes - 1) / (2 * kLanes) * (kSteps / kFetchSteps);
  }

  // All keys lie in the prefix.
  void list(const Plan& plan, const Task& task, int64_t first_key) {
    keys_.list(p_, plan, task, {0, 0, kChunk, 0, nullptr, 0}, first_key, 0, nullptr);
  }

  // scores[r * kChunk + key] of `rows` <= kDirectRows rows.
  void score(int rows, const Operand* q, int64_t ldq, Real* scores, Ahead* ahead) const {
    std::memset(scores, 0, rows * kChunk * sizeof(Real));
    with_rows(rows, [&]<int kRows>() {
      with_stored<A>(p_.cache_element, [&]<class Stored>() { score_as<Stored, kRows>(q, ldq, scores, ahead); });
    });
  }

  // out = out * factor + weights . values
  void weigh(int rows, const Operand* weights, const Real* factors, Real* out, int64_t ldv, Ahead* ahead) const {
    with_rows(rows, [&]<int kRows>() {
      with_stored<A>(p_.cache_element,
                     [&]<class Stored>() { weigh_as<Stored, kRows>(weights, factors, out, ldv, ahead); });
    });
  }

 private:
  static constexpr int kDim = kLanes * A::kPerStep;

  // Keys side by side in vectors, kLanes steps at a time; unfinished sums wait in `scores`, so that the chains of
  // additions of several vectors overlap.
  template <class Stored, int kRows>
  __attribute__((noinline)) void score_as(const Operand* q, int64_t ldq, Real* scores, Ahead* ahead) const {
    for (int32_t d = 0; d < p_.qk_dim; d += kDim, q += kLanes) {
      const int32_t count = smaller((p_.qk_dim - d + A::kPerStep - 1) / A::kPerStep, kLanes);
      for (int32_t key = 0; key < kChunk; key += kLanes) {
        ahead->fetch();
        OperandVec steps[kLanes];
        A::template load_keys<Stored>(keys_.k + key, d, p_.qk_dim, steps);
        Vec sums[kRows];
        SPECDEC_UNROLL_LOOP
        for (int r = 0; r < kRows; ++r) sums[r] = Vec::load(scores + r * kChunk + key);
        if (count == kLanes) {
          SPECDEC_UNROLL_LOOP
          for (int i = 0; i < kLanes; ++i) add_step(q + i, ldq, steps[i], sums);
        } else {
          for (int i = 0; i < count; ++i) add_step(q + i, ldq, steps[i], sums);
        }
        SPECDEC_UNROLL_LOOP
        for (int r = 0; r < kRows; ++r) sums[r].store(scores + r * kChunk + key);
      }
    }
  }

  template <int kRows>
  static SPECDEC_INLINE void add_step(const Operand* q, int64_t ldq, OperandVec keys, Vec (&sums)[kRows]) {
    SPECDEC_UNROLL_LOOP
    for (int r = 0; r < kRows; ++r) sums[r] = A::dot(sums[r], keys, A::broadcast(q[r * ldq]));
  }

  template <class Stored, int kRows>
  __attribute__((noinline)) void weigh_as(const Operand* weights, const Real* factors, Real* out, int64_t ldv,
                                          Ahead* ahead) const {
    int32_t d = 0;
    for (; d + kLanes < ldv; d += 2 * kLanes) weigh_dims<Stored, kRows, 2>(weights, d, factors, out + d, ldv, ahead);
    if (d < ldv) weigh_dims<Stored, kRows, 1>(weights, d, factors, out + d, ldv, ahead);
  }

  template <class Stored, int kRows, int kVecs>
  SPECDEC_INLINE void weigh_dims(const Operand* weights, int32_t d, const Real* factors, Real* out, int64_t ldv,
                                 Ahead* ahead) const {
    Vec sums[kRows][kVecs];
    SPECDEC_UNROLL_LOOP
    for (int r = 0; r < kRows; ++r) {
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) sums[r][n] = Vec::all(0);
    }
    for (int32_t step = 0; step < kSteps; ++step) {
      if (step % kFetchSteps == 0) ahead->fetch();
      OperandVec values[2];
      A::template load_values<Stored>(keys_.v + step * A::kPerStep, d, p_.v_dim, values);
      SPECDEC_UNROLL_LOOP
      for (int r = 0; r < kRows; ++r) {
        const OperandVec weight = A::broadcast(weights[r * kSteps + step]);
        SPECDEC_UNROLL_LOOP
        for (int n = 0; n < kVecs; ++n) sums[r][n] = A::dot(sums[r][n], values[n], weight);
      }
    }
    Tiles<A>::finish(sums, factors, out, ldv);
  }

  template <int kRows = kDirectRows, class F>
  static SPECDEC_INLINE void with_rows(int rows, const F& f) {
    if constexpr (kRows > 1) {
      if (rows < kRows) return with_rows<kRows - 1>(rows, f);
    }
    f.template operator()<kRows>();
  }

  const Problem& p_;
  KeyRows keys_;
};

}  // namespace
}  // namespace attention
}  // namespace specdec
