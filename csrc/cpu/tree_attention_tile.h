// The two products of attention over one chunk, on packed operands, and the packing.
//
// Packed keys:    keys[step * kChunk + key]      all keys of one step side by side
// Packed values:  values[step * ldv + dim]
// A row's sum takes the same steps in the same order whatever tile the row is in, so its bits do not depend on the rows
// beside it.
#pragma once

#include "cpu/tree_attention_arithmetic.h"

namespace specdec {
namespace attention {
namespace {

// Vectors of a tile of kTileRows rows, so that sums and operands fit the registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVecs = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTileVecs = 2;
#else
constexpr int kTileRows = 4, kTileVecs = 2;
#endif

template <class A>
struct Tiles {
  using Real = typename A::Real;
  using Vec = typename A::Vec;
  using Operand = typename A::Operand;

  struct Values {
    const Operand* weights;  // row r at r * kChunk / kPerStep
    const Operand* values;   // step s at s * ldv
    int64_t ldv;
    int32_t begin;  // steps
    int32_t end;
    Real* sums;           // unfinished, rows ldv apart
    const Real* factors;  // as `needed` returns them
    Real* out;
  };

  // scores[r * kChunk + key] = sum over steps of q[r] * keys, for kRows rows and kVecs vectors of keys.
  template <int kRows, int kVecs>
  __attribute__((noinline)) static void score(const Operand* q, int64_t ldq, const Operand* keys, int32_t num_steps,
                                              Real* scores) {
    Vec sums[kRows][kVecs];
    SPECDEC_UNROLL_LOOP
    for (int r = 0; r < kRows; ++r) {
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) sums[r][n] = Vec::all(0);
    }
    SPECDEC_UNROLL_TWICE  // short loops end without a wrong guess
        for (int32_t step = 0; step < num_steps; ++step) {
      typename A::OperandVec key[kVecs];
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) key[n] = A::load(keys + static_cast<int64_t>(step) * kChunk + n * A::kLanes);
      SPECDEC_UNROLL_LOOP
      for (int r = 0; r < kRows; ++r) {
        const typename A::OperandVec x = A::broadcast(q[r * ldq + step]);
        SPECDEC_UNROLL_LOOP
        for (int n = 0; n < kVecs; ++n) sums[r][n] = A::dot(sums[r][n], key[n], x);
      }
    }
    SPECDEC_UNROLL_LOOP
    for (int r = 0; r < kRows; ++r) {
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) sums[r][n].store(scores + r * kChunk + n * A::kLanes);
    }
  }

  // Weights times values over steps begin ... end - 1, for kVecs vectors of dims from `dim` on. kInto: added to x.sums;
  // else out = out * factor + product.
  template <int kRows, int kVecs, bool kInto>
  __attribute__((noinline)) static void weigh(const Values& x, int32_t dim) {
    constexpr int kLdw = kChunk / A::kPerStep;
    Vec sums[kRows][kVecs];
    SPECDEC_UNROLL_LOOP
    for (int r = 0; r < kRows; ++r) {
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) {
        sums[r][n] = kInto ? Vec::load(x.sums + r * x.ldv + dim + n * A::kLanes) : Vec::all(0);
      }
    }
    const Operand* values = x.values + x.begin * x.ldv + dim;
    SPECDEC_UNROLL_TWICE
    for (int32_t step = x.begin; step < x.end; ++step, values += x.ldv) {
      typename A::OperandVec value[kVecs];
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) value[n] = A::load(values + n * A::kLanes);
      SPECDEC_UNROLL_LOOP
      for (int r = 0; r < kRows; ++r) {
        const typename A::OperandVec weight = A::broadcast(x.weights[r * kLdw + step]);
        SPECDEC_UNROLL_LOOP
        for (int n = 0; n < kVecs; ++n) sums[r][n] = A::dot(sums[r][n], value[n], weight);
      }
    }
    if constexpr (kInto) {
      each(sums, x.sums + dim, x.ldv, [](int, Vec, Vec sum) __attribute__((always_inline)) { return sum; });
    } else {
      finish(sums, x.factors, x.out + dim, x.ldv);
    }
  }

  // The factors, or null when they are all 1, as nearly always.
  static const Real* needed(int rows, const Real* factors) {
    for (int r = 0; r < rows; ++r) {
      if (factors[r] != 1) return factors;
    }
    return nullptr;
  }

  // out = out * factor + sum. An addition has the same bits when the factor is 1, and leaves the multipliers alone.
  template <int kRows, int kVecs>
  static SPECDEC_INLINE void finish(const Vec (&sums)[kRows][kVecs], const Real* factors, Real* out, int64_t ldv) {
    if (factors == nullptr) {
      each(sums, out, ldv, [](int, Vec before, Vec sum) __attribute__((always_inline)) { return before + sum; });
    } else {
      each(sums, out, ldv, [&](int r, Vec before, Vec sum) __attribute__((always_inline)) {
        return Vec::fma(before, Vec::all(factors[r]), sum);
      });
    }
  }

  // The step whose pair is half visible to its row: sums += weights * values with the other half left out.
  static void weigh_half(const Operand* weights, const Operand* values, int64_t ldv, int32_t step, bool second,
                         Real* sums) {
    const typename A::OperandVec weight = A::broadcast(weights[step]);
    for (int64_t dim = 0; dim < ldv; dim += A::kLanes) {
      const typename A::OperandVec value = A::keep_one(A::load(values + step * ldv + dim), second);
      A::dot(Vec::load(sums + dim), value, weight).store(sums + dim);
    }
  }

  static void score_rows(int rows, int num_vecs, const Operand* q, int64_t ldq, const Operand* keys, int32_t num_steps,
                         Real* scores) {
    for (int n = 0; n < num_vecs; n += kTileVecs) {
      with_shape(rows, smaller(kTileVecs, num_vecs - n), [&]<int kRows, int kVecs>() {
        score<kRows, kVecs>(q, ldq, keys + n * A::kLanes, num_steps, scores + n * A::kLanes);
      });
    }
  }

  template <bool kInto>
  static void weigh_rows(int rows, const Values& x) {
    const int num_vecs = static_cast<int>(x.ldv) / A::kLanes;
    const int parts = (num_vecs + kTileVecs - 1) / kTileVecs;
    for (int part = 0, n = 0; part < parts; ++part) {
      const int vecs = (num_vecs - n + parts - part - 1) / (parts - part);
      with_shape(rows, vecs, [&]<int kRows, int kVecs>() { weigh<kRows, kVecs, kInto>(x, n * A::kLanes); });
      n += vecs;
    }
  }

 private:
  template <int kRows, int kVecs, class F>
  static SPECDEC_INLINE void each(const Vec (&sums)[kRows][kVecs], Real* out, int64_t ldv, const F& f) {
    SPECDEC_UNROLL_LOOP
    for (int r = 0; r < kRows; ++r, out += ldv) {
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) f(r, Vec::load(out + n * A::kLanes), sums[r][n]).store(out + n * A::kLanes);
    }
  }

  // Calls f<rows, vecs>(); the full tile, which is most of the work, is tried first.
  template <int kRows = kTileRows, int kVecs = kTileVecs, class F>
  static SPECDEC_INLINE void with_shape(int rows, int vecs, const F& f) {
    if constexpr (kRows > 1) {
      if (rows < kRows) return with_shape<kRows - 1, kVecs>(rows, vecs, f);
    }
    if constexpr (kVecs > 1) {
      if (vecs < kVecs) return with_shape<kRows, kVecs - 1>(rows, vecs, f);
    }
    f.template operator()<kRows, kVecs>();
  }
};

}  // namespace
}  // namespace attention
}  // namespace specdec
