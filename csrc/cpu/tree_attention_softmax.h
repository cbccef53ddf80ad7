// Softmax of one row, chunk by chunk, and the merge of its groups.
//
// A row's state over a group: the subtrahend `max` of the exponents, a vector of partial sums of the weights, and the
// unnormalised output. `max` is raised only when a score exceeds it by more than `slack`, so that it seldom changes;
// a weight is at most e^slack.
#pragma once

#include "cpu/tree_attention_tile.h"

namespace specdec {
namespace attention {
namespace {

template <class A>
struct Softmax {
  using Real = typename A::Real;
  using Vec = typename A::Vec;
  static constexpr int kLanes = A::kLanes;
  static constexpr int kVecs = kChunk / kLanes;
  static constexpr int kSteps = kChunk / A::kPerStep;
  static constexpr Real kNone = -__builtin_inff();

  // In units of A::kUnit, but for `inner_scale`.
  Real scale;
  Real softcap;      // 0: none
  Real inner_scale;  // scale / softcap
  Real slack;

  static SPECDEC_INLINE Real power_one(Real x) {
    Real lanes[kLanes];
    A::power(Vec::all(x)).store(lanes);
    return lanes[0];
  }

  // Turns the scores of rows that see a whole chunk into weights, as `weights` does, several rows in flight.
  void whole(int rows, const Real* scores, typename A::Operand* to, Real* max, Real* sums, Real* factors) const {
    if (softcap != 0 || !(scale > 0)) {
      for (int r = 0; r < rows; ++r) {
        factors[r] = weights(kVecs, 0, kChunk, scores + r * kChunk, to + r * kSteps, max + r, sums + r * kLanes);
      }
      return;
    }
    for (int r = 0; r < rows; ++r, scores += kChunk, to += kSteps, sums += kLanes) {
      Vec top = Vec::load(scores);
      SPECDEC_UNROLL_LOOP
      for (int i = 1; i < kVecs; ++i) top = Vec::max(top, Vec::load(scores + i * kLanes));
      top = Vec::max(Vec::all(kNone), top * Vec::all(scale));
      factors[r] = Vec::any_greater(top, Vec::all(max[r] + slack)) ? raise(top, max + r) : Real(1);
      const Vec shift = shift_of(max[r]);
      Vec x[kVecs];
      Vec sum = Vec::all(0);
      SPECDEC_UNROLL_LOOP
      for (int i = 0; i < kVecs; ++i) {
        x[i] = A::power(Vec::fma(Vec::load(scores + i * kLanes), Vec::all(scale), shift));
        sum = sum + x[i];
      }
      Vec::fma(Vec::load(sums), Vec::all(factors[r]), sum).store(sums);
      A::store_weights(x, kVecs, to);
    }
  }

  // Turns the scores of keys begin ... end - 1 of a chunk into weights, 0 elsewhere in the first num_vecs vectors.
  // Returns the factor for what the row has summed before.
  Real weights(int num_vecs, int begin, int end, const Real* scores, typename A::Operand* to, Real* max,
               Real* sums) const {
    if (softcap != 0) return update<0, true, true>(num_vecs, begin, end, scores, to, max, sums);
    if (begin > 0 || end < kChunk) return update<0, true, false>(num_vecs, begin, end, scores, to, max, sums);
    return update<kVecs, false, false>(kVecs, 0, kChunk, scores, to, max, sums);
  }

 private:
  // Returns the factor for what was summed below the old maximum.
  __attribute__((noinline)) static Real raise(Vec top, Real* max) {
    const Real before = *max;
    *max = top.largest();
    return power_one(before - *max);
  }

  static SPECDEC_INLINE Vec shift_of(Real max) { return Vec::all(max == kNone ? Real(0) : -max); }

  template <int kFixed, class F>
  static SPECDEC_INLINE void each(int count, const F& f) {
    if constexpr (kFixed > 0) {
      SPECDEC_UNROLL_LOOP
      for (int i = 0; i < kFixed; ++i) f(i);
    } else {
      for (int i = 0; i < count; ++i) f(i);
    }
  }

  // kFixed: the number of vectors, 0 when it is not known beforehand.
  template <int kFixed, bool kMasked, bool kCapped>
  SPECDEC_INLINE Real update(int num_vecs, int begin, int end, const Real* scores, typename A::Operand* to, Real* max,
                             Real* sums) const {
    Vec x[kVecs];
    const Vec none = Vec::all(kNone);
    Vec top = none;
    each<kFixed>(num_vecs, [&](int i) __attribute__((always_inline)) {
      x[i] = Vec::load(scores + i * kLanes);
      if constexpr (kCapped) x[i] = Vec::all(softcap) * tanh(x[i] * Vec::all(inner_scale));
      const Vec score = kCapped ? x[i] : x[i] * Vec::all(scale);
      top = Vec::max(top, kMasked ? Vec::inside(begin - i * kLanes, end - i * kLanes, score, none) : score);
    });
    const Real factor = Vec::any_greater(top, Vec::all(*max + slack)) ? raise(top, max) : Real(1);
    const Vec shift = shift_of(*max);
    Vec sum = Vec::all(0);
    each<kFixed>(num_vecs, [&](int i) __attribute__((always_inline)) {
      x[i] = kCapped ? x[i] + shift : Vec::fma(x[i], Vec::all(scale), shift);
      x[i] = A::power(x[i]);
      if constexpr (kMasked) x[i] = Vec::inside(begin - i * kLanes, end - i * kLanes, x[i], Vec::all(0));
      sum = sum + x[i];
    });
    Vec::fma(Vec::load(sums), Vec::all(factor), sum).store(sums);
    A::store_weights(x, num_vecs, to);
    return factor;
  }
};

// A row over one or more groups. sum == 0: it has seen nothing (a sum of NaN has).
template <class Real>
struct RowState {
  Real* max;
  Real* sum;
  Real* out;
};

// to = to and part, in this order.
template <class A>
void merge_row(const RowState<typename A::Real>& to, const RowState<typename A::Real>& part, int64_t ldv) {
  using Vec = typename A::Vec;
  using Real = typename A::Real;
  if (*part.sum == 0) return;
  if (*to.sum == 0) {
    *to.max = *part.max;
    *to.sum = *part.sum;
    std::memcpy(to.out, part.out, ldv * sizeof(Real));
    return;
  }
  const Real max = larger(*to.max, *part.max);
  const Real a = Softmax<A>::power_one(*to.max - max);
  const Real b = Softmax<A>::power_one(*part.max - max);
  *to.max = max;
  *to.sum = *to.sum * a + *part.sum * b;
  for (int64_t d = 0; d < ldv; d += A::kLanes) {
    Vec::fma(Vec::load(to.out + d), Vec::all(a), Vec::load(part.out + d) * Vec::all(b)).store(to.out + d);
  }
}

SPECDEC_INLINE float log_of(float x) { return __builtin_logf(x); }
SPECDEC_INLINE double log_of(double x) { return __builtin_log(x); }

// Joins the sink, if there is one. Returns the log-sum-exp and the factor that makes `out` the result.
template <class A>
typename A::Real finish_row(const RowState<typename A::Real>& row, const double* sink, typename A::Real* factor) {
  using Real = typename A::Real;
  Real max = *row.max, sum = *row.sum, a = 1;
  if (sink) {
    const Real scaled = static_cast<Real>(*sink * A::kUnit);
    max = larger(max, scaled);
    a = Softmax<A>::power_one(*row.max - max);
    sum = sum * a + Softmax<A>::power_one(scaled - max);
  }
  *factor = sum == 0 ? Real(0) : a / sum;
  return sum == 0 ? Softmax<A>::kNone : max * static_cast<Real>(1 / A::kUnit) + log_of(sum);
}

}  // namespace
}  // namespace attention
}  // namespace specdec
