// Doubles of one register and their powers of two, for the instruction set of the translation unit that includes this.
#pragma once

#include "cpu/vec.h"

namespace specdec {
namespace verification {
namespace {

// As vec.h chooses: doubles of one register, and as many integers.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define SPECDEC_WIDE 8
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SPECDEC_WIDE 4
#else
#define SPECDEC_WIDE 2
#endif
constexpr int kWide = SPECDEC_WIDE;
typedef double Wide __attribute__((vector_size(8 * kWide)));
typedef int64_t WideInt __attribute__((vector_size(8 * kWide)));
constexpr int kPerStep = 2 * kWide;

SPECDEC_INLINE Wide wide(double x) { return x - Wide{}; }

SPECDEC_INLINE Wide fma(Wide a, Wide b, Wide c) {
#if SPECDEC_WIDE == 8
  return Wide(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif SPECDEC_WIDE == 4
  return Wide(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#else
  return a * b + c;
#endif
}

// b when either is NaN.
SPECDEC_INLINE Wide max(Wide a, Wide b) {
#if SPECDEC_WIDE == 8
  return Wide(_mm512_max_pd(__m512d(a), __m512d(b)));
#elif SPECDEC_WIDE == 4
  return Wide(_mm256_max_pd(__m256d(a), __m256d(b)));
#else
  return a > b ? a : b;
#endif
}

SPECDEC_INLINE double sum(Wide a) {
  double total = 0;
  for (int i = 0; i < kWide; ++i) total += a[i];
  return total;
}

// kPerStep logits.
struct Pair {
  Wide low, high;
};

SPECDEC_INLINE Pair widen(const FloatVec& x) {
#if SPECDEC_WIDE == 8
  return {Wide(_mm512_cvtps_pd(_mm512_castps512_ps256(x.v))), Wide(_mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)))};
#elif SPECDEC_WIDE == 4
  return {Wide(_mm256_cvtps_pd(_mm256_castps256_ps128(x.v))), Wide(_mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)))};
#else
  return {Wide{x.v[0], x.v[1]}, Wide{x.v[2], x.v[3]}};
#endif
}

template <class T>
SPECDEC_INLINE Pair load(const T* p) {
  static_assert(FloatVec::kLanes == kPerStep);
  return widen(FloatVec::load_some(p, kPerStep));
}
SPECDEC_INLINE Pair load(const double* p) {
  Pair to;
  std::memcpy(&to, p, sizeof(to));
  return to;
}

SPECDEC_INLINE double to_double(double x) { return x; }
template <class T>
SPECDEC_INLINE double to_double(T x) {
  return to_float(x);
}

// 2^t for t <= 0, relative error below 3e-12, exactly 1 at 0: t = n + f with n whole and |f| <= 1/2, and 2^f by a
// minimax polynomial. Below -1020 the result is 0. NaN stays NaN.
SPECDEC_INLINE Wide exp2(Wide t) {
  const Wide x = max(wide(-1100.0), t);
#if SPECDEC_WIDE == 8
  const Wide n = Wide(_mm512_roundscale_pd(__m512d(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Wide magic = wide(0x1.8p52), shifted = x + magic;  // ends in n as an integer
  const Wide n = shifted - magic;
#endif
  const Wide f = x - n;
  Wide p = fma(wide(1.325080551750225e-06), f, wide(1.5303700711365693e-05));
  p = fma(p, f, wide(1.5403475186530786e-04));
  p = fma(p, f, wide(1.3333478473685416e-03));
  p = fma(p, f, wide(9.6181291352361400e-03));
  p = fma(p, f, wide(5.5504109063258665e-02));
  p = fma(p, f, wide(2.4022650695888503e-01));
  p = fma(p, f, wide(6.9314718055683240e-01));
  p = fma(p, f, wide(1.0));
#if SPECDEC_WIDE == 8
  const __mmask8 is_large = _mm512_cmp_pd_mask(__m512d(t), __m512d(wide(-1020.0)), _CMP_NLT_UQ);  // or NaN
  return Wide(_mm512_maskz_scalef_pd(is_large, __m512d(p), __m512d(n)));
#else
  const WideInt is_nan = t != t, is_tiny = t < wide(-1020.0);
  return Wide(((WideInt(p) + (WideInt(shifted) << 52)) & ~is_tiny) | (WideInt(t) & is_nan));
#endif
}

}  // namespace
}  // namespace verification
}  // namespace specdec
