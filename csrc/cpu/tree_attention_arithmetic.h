// How a machine multiplies and adds, and how the operands are brought into its form.
//
// A step is one dim (scores) or one key (values), or two of them where the machine multiplies pairs. In scores the
// lanes are keys, in values they are dims.
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
  static SPECDEC_INLINE void store(OperandVec x, Operand* p) { x.store(p); }
  static SPECDEC_INLINE OperandVec broadcast(Operand x) { return V::all(x); }
  static SPECDEC_INLINE Vec dot(Vec sum, OperandVec a, OperandVec b) { return V::fma(a, b, sum); }

  template <class T>
  static void pack_query(const T* row, int32_t dim, Operand* to) {
    for (int32_t d = 0; d < dim; d += kLanes) V::load_some(row + d, dim - d).store(to + d);
  }

  // kLanes steps of kLanes keys, from dim d on.
  template <class T>
  static SPECDEC_INLINE void load_keys(const char* const* rows, int32_t d, int32_t dim, OperandVec (&steps)[kLanes]) {
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < kLanes; ++i) steps[i] = V::load_some(as<T>(rows[i]) + d, dim - d);
    V::transpose(steps);
  }

  // Two vectors of one step of values, from dim d on.
  template <class T>
  static SPECDEC_INLINE void load_values(const char* const* rows, int32_t d, int32_t dim, OperandVec (&values)[2]) {
    const T* const row = as<T>(rows[0]) + d;
    values[0] = V::load_some(row, dim - d);
    values[1] = dim - d > kLanes ? V::load_some(row + kLanes, dim - d - kLanes) : V::all(0);
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
  static SPECDEC_INLINE void store(OperandVec x, Operand* p) { _mm512_storeu_si512(p, x); }
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
  static SPECDEC_INLINE void load_keys(const char* const* rows, int32_t d, int32_t dim, OperandVec (&steps)[kLanes]) {
    Vec block[kLanes];
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < kLanes; ++i) block[i].v = _mm512_castsi512_ps(load_row(as<T>(rows[i]) + d, dim - d));
    Vec::transpose(block);
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < kLanes; ++i) steps[i] = _mm512_castps_si512(block[i].v);
  }

  template <class T>
  static SPECDEC_INLINE void load_values(const char* const* rows, int32_t d, int32_t dim, OperandVec (&values)[2]) {
    const __m512i low = _mm512_set_epi32(0x002f000f, 0x002e000e, 0x002d000d, 0x002c000c, 0x002b000b, 0x002a000a,
                                         0x00290009, 0x00280008, 0x00270007, 0x00260006, 0x00250005, 0x00240004,
                                         0x00230003, 0x00220002, 0x00210001, 0x00200000);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i first = load_row(as<T>(rows[0]) + d, dim - d), second = load_row(as<T>(rows[1]) + d, dim - d);
    values[0] = _mm512_permutex2var_epi16(first, low, second);
    values[1] = _mm512_permutex2var_epi16(first, high, second);
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

}  // namespace
}  // namespace attention
}  // namespace specdec
