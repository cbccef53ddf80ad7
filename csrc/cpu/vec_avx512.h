// FloatVec of 16 lanes. Included by vec.h.
#pragma once

namespace specdec {
namespace {

struct Avx512Vec {
  using Real = float;
  static constexpr int kLanes = 16;
  __m512 v;

  static SPECDEC_INLINE __mmask16 first(int count) { return count >= 16 ? 0xffff : (1u << count) - 1u; }

  static SPECDEC_INLINE Avx512Vec all(float x) { return {_mm512_set1_ps(x)}; }
  static SPECDEC_INLINE Avx512Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static SPECDEC_INLINE Avx512Vec load_some(const float* p, int count) {
    return {_mm512_maskz_loadu_ps(first(count), p)};
  }
  static SPECDEC_INLINE Avx512Vec load_some(const BFloat16* p, int count) {
    const __m256i bits = _mm256_maskz_loadu_epi16(first(count), p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static SPECDEC_INLINE Avx512Vec load_some(const Half* p, int count) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p))};
  }
  static SPECDEC_INLINE Avx512Vec load_some(const int8_t* p, int count) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(count), p)))};
  }
  static SPECDEC_INLINE Avx512Vec load_some(const Float8* p, int count) {
    const __m512i bits = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(count), p));
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7f));
    __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)), _mm512_set1_ps(0x1p120f));
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    value = _mm512_mask_mov_ps(value, is_nan, _mm512_set1_ps(__builtin_nanf("")));
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x80)), 24);
    return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign))};
  }
  SPECDEC_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  SPECDEC_INLINE void store_some(float* p, int count) const { _mm512_mask_storeu_ps(p, first(count), v); }
  SPECDEC_INLINE void store_some(Half* p, int count) const {
    _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  SPECDEC_INLINE void store_some(BFloat16* p, int count) const {
    _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(), 16)));
  }
  // The nearest bf16 in the upper half of each lane, anything in the lower.
  SPECDEC_INLINE __m512i rounded_bits() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  }
  SPECDEC_INLINE Avx512Vec rounded_to(const BFloat16*) const {
    return {_mm512_castsi512_ps(_mm512_and_si512(rounded_bits(), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }

  friend SPECDEC_INLINE Avx512Vec operator+(Avx512Vec a, Avx512Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend SPECDEC_INLINE Avx512Vec operator-(Avx512Vec a, Avx512Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend SPECDEC_INLINE Avx512Vec operator*(Avx512Vec a, Avx512Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend SPECDEC_INLINE Avx512Vec operator/(Avx512Vec a, Avx512Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  static SPECDEC_INLINE Avx512Vec fma(Avx512Vec a, Avx512Vec b, Avx512Vec c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
  }
  static SPECDEC_INLINE Avx512Vec max(Avx512Vec a, Avx512Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  static SPECDEC_INLINE bool any_greater(Avx512Vec a, Avx512Vec b) {
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0;
  }
  static SPECDEC_INLINE Avx512Vec inside(int low, int high, Avx512Vec a, Avx512Vec b) {
    const uint32_t from = low <= 0 ? 0xffffu : low >= 16 ? 0u : 0xffffu << low;
    const __mmask16 mask = static_cast<__mmask16>(high <= 0 ? 0u : from & first(high));
    return {_mm512_mask_mov_ps(b.v, mask, a.v)};
  }
  static SPECDEC_INLINE Avx512Vec if_below(Avx512Vec a, float limit, Avx512Vec b, Avx512Vec c) {
    const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_abs_ps(a.v), _mm512_set1_ps(limit), _CMP_LT_OQ);
    return {_mm512_mask_mov_ps(c.v, mask, b.v)};
  }
  static SPECDEC_INLINE Avx512Vec copy_sign(Avx512Vec magnitude, Avx512Vec sign) {
    const __m512i bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    // 0xca: bit ? sign : magnitude
    return {_mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign.v), _mm512_castps_si512(magnitude.v), 0xca))};
  }
  static SPECDEC_INLINE Avx512Vec round(Avx512Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static SPECDEC_INLINE Avx512Vec scale_by_power(Avx512Vec a, Avx512Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
  // 2^x for x < 128, relative error below 2e-7, exactly 1 at 0, 0 below 2^-125. Additions, which have ports of their
  // own, take the place of the slower instructions that round and scale.
  static SPECDEC_INLINE Avx512Vec exp2(Avx512Vec x) {
    const Avx512Vec shift = all(0x1.8p23f);
    const Avx512Vec rounded = x + shift;  // the whole part is in the last bits
    const Avx512Vec f = x - (rounded - shift);
    Avx512Vec p = fma(all(1.326472731e-03f), f, all(9.671512991e-03f));
    p = fma(p, f, all(5.550733581e-02f));
    p = fma(p, f, all(2.402224243e-01f));
    p = fma(p, f, all(6.931470037e-01f));
    const __m512i bits = _mm512_castps_si512(fma(p, f, all(1.0f)).v);
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(rounded.v), 23);
    const __mmask16 normal = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
    return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(normal, bits, exponent))};
  }
  SPECDEC_INLINE float largest() const { return _mm512_reduce_max_ps(v); }
  SPECDEC_INLINE float sum() const {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  static SPECDEC_INLINE void transpose(Avx512Vec (&rows)[16]) {
    __m512 a[16], b[16];
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
      a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    // b[4g + c]: column c of each 128-bit lane, rows 4g ... 4g + 3.
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < 16; i += 4) {
      b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
      b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
      b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
      b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    // Gather the four groups of one column: first lanes 0, 2 and 1, 3 of two groups, then of all four.
    SPECDEC_UNROLL_LOOP
    for (int c = 0; c < 4; ++c) {
      const __m512 low02 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
      const __m512 low13 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
      const __m512 high02 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
      const __m512 high13 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
      rows[c].v = _mm512_shuffle_f32x4(low02, high02, 0x88);
      rows[4 + c].v = _mm512_shuffle_f32x4(low13, high13, 0x88);
      rows[8 + c].v = _mm512_shuffle_f32x4(low02, high02, 0xdd);
      rows[12 + c].v = _mm512_shuffle_f32x4(low13, high13, 0xdd);
    }
  }
};

using FloatVec = Avx512Vec;

}  // namespace
}  // namespace specdec
