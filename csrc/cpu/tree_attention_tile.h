// The two products of attention over one chunk, on packed operands, and the packing.
//
// Packed keys:    keys[step * kChunk + key]      all keys of one step side by side: lanes are keys
// Packed values:  values[step * ldv + dim]       lanes are dims
// A step is one dim (scores) or one key (values), or two of them where the machine multiplies pairs. A row's sum takes
// the same steps in the same order whatever tile the row is in, so its bits do not depend on the rows beside it.
#pragma once

#include "cpu/tree_attention.h"
#include "cpu/vec_math.h"

namespace specdec {
namespace attention {
namespace {

template <class T>
SPECDEC_INLINE const T* as(const void* p) {
  return static_cast<const T*>(p);
}

SPECDEC_INLINE int32_t round_up(int32_t n, int32_t to) { return (n + to - 1) / to * to; }

// Everything in Real: one key, one dim a step.
template <class V>
struct FmaArithmetic {
  using Vec = V;
  using Real = typename V::Real;
  using Operand = Real;
  using OperandVec = V;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kPerStep = 1;

  static SPECDEC_INLINE OperandVec load(const Operand* p) { return V::load(p); }
  static SPECDEC_INLINE OperandVec broadcast(Operand x) { return V::all(x); }
  static SPECDEC_INLINE Vec dot(Vec sum, OperandVec a, OperandVec b) { return V::fma(a, b, sum); }

  template <class T>
  static void pack_query(const T* row, int32_t dim, Operand* to) {
    for (int32_t d = 0; d < dim; d += kLanes) V::load_some(row + d, dim - d).store(to + d);
  }

  // kLanes keys; `to` is the place of the first.
  template <class T>
  static SPECDEC_INLINE void pack_keys(const char* const* rows, int32_t dim, Operand* to) {
    for (int32_t d = 0; d < dim; d += kLanes) {
      V block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = V::load_some(as<T>(rows[i]) + d, dim - d);
      V::transpose(block);
      for (int i = 0; i < kLanes; ++i) block[i].store(to + static_cast<int64_t>(d + i) * kChunk);
    }
  }

  template <class T>
  static SPECDEC_INLINE void pack_values(const char* const* rows, int32_t dim, Operand* to) {
    for (int32_t d = 0; d < dim; d += kLanes) V::load_some(as<T>(rows[0]) + d, dim - d).store(to + d);
  }

  static SPECDEC_INLINE void store_weights(const Vec* weights, int num_vecs, Operand* to) {
    for (int i = 0; i < num_vecs; ++i) weights[i].store(to + i * kLanes);
  }

  static SPECDEC_INLINE OperandVec keep_one(OperandVec x, bool) { return x; }

  // Scores are measured in units of the logarithm's base: kUnit of them are a factor of e.
  static constexpr double kUnit = 1.0;
  static SPECDEC_INLINE Vec power(Vec x) { return exp(x); }
};

#if defined(__AVX512BF16__)
// Pairs of bf16 into fp32 sums. int8 and float8 values are exact in bf16.
struct PairArithmetic {
  using Vec = FloatVec;
  using Real = float;
  using Operand = uint32_t;  // two bf16, the first in the low half
  using OperandVec = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kPerStep = 2;

  static SPECDEC_INLINE OperandVec load(const Operand* p) { return _mm512_loadu_si512(p); }
  static SPECDEC_INLINE OperandVec broadcast(Operand x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static SPECDEC_INLINE Vec dot(Vec sum, OperandVec a, OperandVec b) {
    return {_mm512_dpbf16_ps(sum.v, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b))};
  }

  static SPECDEC_INLINE __m512i load_row(const BFloat16* p, int count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? ~0u : (1u << count) - 1u, p);
  }
  template <class T>
  static SPECDEC_INLINE __m512i load_row(const T* p, int count) {
    const Vec low = Vec::load_some(p, count);
    const Vec high = count > 16 ? Vec::load_some(p + 16, count - 16) : Vec::all(0.0f);
    return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
  }

  static void pack_query(const BFloat16* row, int32_t dim, Operand* to) {
    for (int32_t d = 0; d < dim; d += 32) _mm512_storeu_si512(to + d / 2, load_row(row + d, dim - d));
  }

  template <class T>
  static SPECDEC_INLINE void pack_keys(const char* const* rows, int32_t dim, Operand* to) {
    for (int32_t d = 0; d < dim; d += 32) {
      Vec block[16];
      for (int i = 0; i < 16; ++i) block[i].v = _mm512_castsi512_ps(load_row(as<T>(rows[i]) + d, dim - d));
      Vec::transpose(block);
      for (int i = 0; i < 16; ++i) _mm512_storeu_ps(to + static_cast<int64_t>(d / 2 + i) * kChunk, block[i].v);
    }
  }

  template <class T>
  static SPECDEC_INLINE void pack_values(const char* const* rows, int32_t dim, Operand* to) {
    const __m512i low = _mm512_set_epi32(0x002f000f, 0x002e000e, 0x002d000d, 0x002c000c, 0x002b000b, 0x002a000a,
                                         0x00290009, 0x00280008, 0x00270007, 0x00260006, 0x00250005, 0x00240004,
                                         0x00230003, 0x00220002, 0x00210001, 0x00200000);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    int32_t d = 0;
    for (; d + 32 <= dim; d += 32) {
      const __m512i first = load_row(as<T>(rows[0]) + d, 32), second = load_row(as<T>(rows[1]) + d, 32);
      _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(first, low, second));
      _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(first, high, second));
    }
    if (d == dim) return;
    const __m512i first = load_row(as<T>(rows[0]) + d, dim - d), second = load_row(as<T>(rows[1]) + d, dim - d);
    _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(first, low, second));
    if (d + 16 < dim) _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(first, high, second));
  }

  // Weights are rounded to bf16 here.
  static SPECDEC_INLINE void store_weights(const Vec* weights, int num_vecs, Operand* to) {
    for (int i = 0; i < num_vecs; i += 2) {
      const __m512 second = i + 1 < num_vecs ? weights[i + 1].v : _mm512_setzero_ps();
      _mm512_storeu_si512(to + i * 8, bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second, weights[i].v)));
    }
  }

  // The pair with the other half zero.
  static SPECDEC_INLINE OperandVec keep_one(OperandVec x, bool second) {
    return _mm512_and_si512(x, _mm512_set1_epi32(second ? static_cast<int>(0xffff0000u) : 0x0000ffff));
  }

  static constexpr double kUnit = 1.4426950408889634;  // log2(e)
  static SPECDEC_INLINE Vec power(Vec x) { return Vec::exp2(x); }
};
#endif

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
    const Operand* values;   // step s at s * value_stride
    int64_t value_stride;
    int64_t ldv;
    int32_t begin;  // steps
    int32_t end;
    const Real* sums_in;  // rows ldv apart; null: 0
    Real* sums_out;       // where unfinished sums go; null: finish
    const Real* factors;  // out = out * factor + sum
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

  // sums[r] += weights[r] * values over steps begin ... end - 1, for kVecs vectors of dims from `dim` on.
  template <int kRows, int kVecs>
  __attribute__((noinline)) static void weigh(const Values& x, int32_t dim) {
    constexpr int kLdw = kChunk / A::kPerStep;
    Vec sums[kRows][kVecs];
    SPECDEC_UNROLL_LOOP
    for (int r = 0; r < kRows; ++r) {
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) {
        sums[r][n] = x.sums_in ? Vec::load(x.sums_in + r * x.ldv + dim + n * A::kLanes) : Vec::all(0);
      }
    }
    const Operand* values = x.values + x.begin * x.value_stride + dim;
    for (int32_t step = x.begin; step < x.end; ++step, values += x.value_stride) {
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
    SPECDEC_UNROLL_LOOP
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = Vec::all(x.factors[r]);
      SPECDEC_UNROLL_LOOP
      for (int n = 0; n < kVecs; ++n) {
        const int64_t at = r * x.ldv + dim + n * A::kLanes;
        if (x.sums_out) {
          sums[r][n].store(x.sums_out + at);
        } else {
          Vec::fma(Vec::load(x.out + at), factor, sums[r][n]).store(x.out + at);
        }
      }
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

  static void weigh_rows(int rows, const Values& x) {
    const int num_vecs = static_cast<int>(x.ldv) / A::kLanes;
    const int parts = (num_vecs + kTileVecs - 1) / kTileVecs;
    for (int part = 0, n = 0; part < parts; ++part) {
      const int vecs = (num_vecs - n + parts - part - 1) / (parts - part);
      with_shape(rows, vecs, [&]<int kRows, int kVecs>() { weigh<kRows, kVecs>(x, n * A::kLanes); });
      n += vecs;
    }
  }

 private:
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
