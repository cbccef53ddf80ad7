// FloatVec of 8 lanes. Included by vec.h.
#pragma once

namespace specdec {
namespace {

struct Avx2Vec {
  using Real = float;
  static constexpr int kLanes = 8;
  __m256 v;

  static SPECDEC_INLINE __m256i lane_ids() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static SPECDEC_INLINE __m256i first(int count) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane_ids()); }

  // The elements that exist, zeros behind them: one load when all do.
  template <class T>
  static SPECDEC_INLINE void fetch(const T* p, int count, T (&to)[8]) {
    if (count >= 8) {
      std::memcpy(to, p, sizeof(to));
    } else {
      std::memset(to, 0, sizeof(to));
      for (int i = 0; i < count; ++i) to[i] = p[i];
    }
  }

  static SPECDEC_INLINE Avx2Vec all(float x) { return {_mm256_set1_ps(x)}; }
  static SPECDEC_INLINE Avx2Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static SPECDEC_INLINE Avx2Vec load_some(const float* p, int count) { return {_mm256_maskload_ps(p, first(count))}; }
  static SPECDEC_INLINE Avx2Vec load_some(const BFloat16* p, int count) {
    BFloat16 some[8];
    fetch(p, count, some);
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(some));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  static SPECDEC_INLINE Avx2Vec load_some(const Half* p, int count) {
    Half some[8];
    fetch(p, count, some);
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(some)))};
  }
  static SPECDEC_INLINE Avx2Vec load_some(const int8_t* p, int count) {
    int8_t some[8];
    fetch(p, count, some);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(some))))};
  }
  static SPECDEC_INLINE Avx2Vec load_some(const Float8* p, int count) {
    Float8 some[8];
    fetch(p, count, some);
    const __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(some)));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f));
    __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)), _mm256_set1_ps(0x1p120f));
    const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    value = _mm256_blendv_ps(value, _mm256_set1_ps(__builtin_nanf("")), _mm256_castsi256_ps(is_nan));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x80)), 24);
    return {_mm256_or_ps(value, _mm256_castsi256_ps(sign))};
  }
  SPECDEC_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
  SPECDEC_INLINE void store_some(float* p, int count) const { _mm256_maskstore_ps(p, first(count), v); }
  template <class T>
  SPECDEC_INLINE void store_some(T* p, int count) const {
    float some[8];
    store(some);
    for (int i = 0; i < smaller(count, 8); ++i) from_float(some[i], p + i);
  }

  friend SPECDEC_INLINE Avx2Vec operator+(Avx2Vec a, Avx2Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend SPECDEC_INLINE Avx2Vec operator-(Avx2Vec a, Avx2Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend SPECDEC_INLINE Avx2Vec operator*(Avx2Vec a, Avx2Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend SPECDEC_INLINE Avx2Vec operator/(Avx2Vec a, Avx2Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
  static SPECDEC_INLINE Avx2Vec fma(Avx2Vec a, Avx2Vec b, Avx2Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static SPECDEC_INLINE Avx2Vec max(Avx2Vec a, Avx2Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  static SPECDEC_INLINE bool any_greater(Avx2Vec a, Avx2Vec b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)) != 0;
  }
  static SPECDEC_INLINE Avx2Vec inside(int low, int high, Avx2Vec a, Avx2Vec b) {
    const __m256i mask = _mm256_andnot_si256(first(low), first(high));
    return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(mask))};
  }
  static SPECDEC_INLINE Avx2Vec if_below(Avx2Vec a, float limit, Avx2Vec b, Avx2Vec c) {
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v);
    return {_mm256_blendv_ps(c.v, b.v, _mm256_cmp_ps(magnitude, _mm256_set1_ps(limit), _CMP_LT_OQ))};
  }
  static SPECDEC_INLINE Avx2Vec copy_sign(Avx2Vec magnitude, Avx2Vec sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_and_ps(bit, sign.v), _mm256_andnot_ps(bit, magnitude.v))};
  }
  static SPECDEC_INLINE Avx2Vec round(Avx2Vec a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  // As ArrayVec: 0 below the smallest normal number. A NaN of a stays, whatever n is.
  static SPECDEC_INLINE Avx2Vec scale_by_power(Avx2Vec a, Avx2Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    const __m256 tiny = _mm256_cmp_ps(n.v, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
    return {_mm256_andnot_ps(tiny, _mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent)))};
  }
  SPECDEC_INLINE float largest() const {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  SPECDEC_INLINE float sum() const {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  static SPECDEC_INLINE void transpose(Avx2Vec (&rows)[8]) {
    __m256 a[8], b[8];
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < 8; i += 2) {
      a[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
      a[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < 8; i += 4) {
      b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
      b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
      b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
      b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    SPECDEC_UNROLL_LOOP
    for (int c = 0; c < 4; ++c) {
      rows[c].v = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
      rows[4 + c].v = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
    }
  }
};

using FloatVec = Avx2Vec;

}  // namespace
}  // namespace specdec
