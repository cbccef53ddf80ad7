// Vectors of fixed width for the CPU kernels: one interface, three machines (AVX512, AVX2, plain C++).
//
// A translation unit is compiled for one instruction set (its folder's, see setup.py) and gets the widest type that its
// flags allow as FloatVec. Everything here is in an unnamed namespace, so that code compiled for a wider instruction
// set is never linked into a narrower translation unit; for the same reason nothing here uses templates of the standard
// library. Files using this are compiled with -ffp-contract=off: a sum is fused only where it says fma.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define SPECDEC_INLINE inline __attribute__((always_inline))
#define SPECDEC_UNROLL_LOOP _Pragma("GCC unroll 16")
#define SPECDEC_UNROLL_TWICE _Pragma("GCC unroll 2")

namespace specdec {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Float8 {  // e4m3fn: no infinity, 0x7f and 0xff are NaN
  uint8_t bits;
};

template <class To, class From>
SPECDEC_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T>
SPECDEC_INLINE T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
SPECDEC_INLINE T larger(T a, T b) {
  return a < b ? b : a;
}

SPECDEC_INLINE float to_float(float x) { return x; }
SPECDEC_INLINE float to_float(int8_t x) { return x; }
SPECDEC_INLINE float to_float(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Moves exponent and mantissa of a small float to their place in fp32 and corrects the bias by a multiplication, which
// also normalises subnormal numbers.
SPECDEC_INLINE float to_float(Half x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  float value = bit_cast<float>(magnitude << 13) * 0x1p112f;
  if (magnitude >= 0x7c00u) value = bit_cast<float>((magnitude << 13) | 0x7f800000u);
  return bit_cast<float>(bit_cast<uint32_t>(value) | static_cast<uint32_t>(x.bits & 0x8000u) << 16);
}
SPECDEC_INLINE float to_float(Float8 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const float value = magnitude == 0x7fu ? __builtin_nanf("") : bit_cast<float>(magnitude << 20) * 0x1p120f;
  return bit_cast<float>(bit_cast<uint32_t>(value) | static_cast<uint32_t>(x.bits & 0x80u) << 24);
}

// Round to nearest, ties to even.
SPECDEC_INLINE void from_float(float x, float* to) { *to = x; }
SPECDEC_INLINE void from_float(float x, BFloat16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  to->bits = static_cast<uint16_t>(x == x ? (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40u);
}
SPECDEC_INLINE void from_float(float x, Half* to) {
  const uint32_t sign = bit_cast<uint32_t>(x) >> 16 & 0x8000u;
  const uint32_t magnitude = bit_cast<uint32_t>(x) & 0x7fffffffu;
  uint32_t bits;
  if (magnitude > 0x7f800000u) {
    bits = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {
    bits = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Subnormal: the addition places the units of 2^-24 at the end of the mantissa, rounded.
    bits = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  } else {
    bits = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | bits);
}

template <class Real>
SPECDEC_INLINE Real fused(Real a, Real b, Real c) {
#if defined(__FMA__) || defined(__aarch64__)
  if constexpr (sizeof(Real) == 4) {
    return __builtin_fmaf(a, b, c);
  } else {
    return __builtin_fma(a, b, c);
  }
#else
  return a * b + c;
#endif
}

template <class Real_, int N>
struct ArrayVec {
  using Real = Real_;
  static constexpr int kLanes = N;
  Real v[N];

  template <class F>
  static SPECDEC_INLINE ArrayVec each(const F& f) {
    ArrayVec to;
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < N; ++i) to.v[i] = f(i);
    return to;
  }
  static SPECDEC_INLINE ArrayVec all(Real x) {
    return each([&](int) { return x; });
  }
  static SPECDEC_INLINE ArrayVec load(const Real* p) {
    return each([&](int i) { return p[i]; });
  }
  template <class T>
  static SPECDEC_INLINE ArrayVec load_some(const T* p, int count) {
    return each([&](int i) { return i < count ? static_cast<Real>(to_real(p[i])) : Real(0); });
  }
  SPECDEC_INLINE void store(Real* p) const { std::memcpy(p, v, sizeof(v)); }
  template <class T>
  SPECDEC_INLINE void store_some(T* p, int count) const {
    for (int i = 0; i < smaller(count, N); ++i) {
      if constexpr (sizeof(T) == 8) {
        p[i] = v[i];
      } else {
        from_float(static_cast<float>(v[i]), p + i);
      }
    }
  }

  friend SPECDEC_INLINE ArrayVec operator+(const ArrayVec& a, const ArrayVec& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  friend SPECDEC_INLINE ArrayVec operator-(const ArrayVec& a, const ArrayVec& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  friend SPECDEC_INLINE ArrayVec operator*(const ArrayVec& a, const ArrayVec& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  friend SPECDEC_INLINE ArrayVec operator/(const ArrayVec& a, const ArrayVec& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static SPECDEC_INLINE ArrayVec fma(const ArrayVec& a, const ArrayVec& b, const ArrayVec& c) {
    return each([&](int i) { return fused(a.v[i], b.v[i], c.v[i]); });
  }
  // b when either is NaN, as the instruction does it.
  static SPECDEC_INLINE ArrayVec max(const ArrayVec& a, const ArrayVec& b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static SPECDEC_INLINE bool any_greater(const ArrayVec& a, const ArrayVec& b) {
    bool any = false;
    for (int i = 0; i < N; ++i) any |= a.v[i] > b.v[i];
    return any;
  }
  // Lanes i with low <= i < high come from a, the others from b.
  static SPECDEC_INLINE ArrayVec inside(int low, int high, const ArrayVec& a, const ArrayVec& b) {
    return each([&](int i) { return i >= low && i < high ? a.v[i] : b.v[i]; });
  }
  // |a| < limit ? b : c
  static SPECDEC_INLINE ArrayVec if_below(const ArrayVec& a, Real limit, const ArrayVec& b, const ArrayVec& c) {
    return each([&](int i) { return a.v[i] < limit && a.v[i] > -limit ? b.v[i] : c.v[i]; });
  }
  static SPECDEC_INLINE ArrayVec copy_sign(const ArrayVec& magnitude, const ArrayVec& sign) {
    return each([&](int i) {
      const Real x = magnitude.v[i] < 0 ? -magnitude.v[i] : magnitude.v[i];
      return __builtin_signbit(sign.v[i]) ? -x : x;
    });
  }
  static SPECDEC_INLINE ArrayVec round(const ArrayVec& a) {  // |a| < 2^22
    constexpr Real kShift = 0x1.8p23;
    return each([&](int i) { return (a.v[i] + kShift) - kShift; });
  }
  // a * 2^n for whole n in [-300, 127]; 0 below the smallest normal number. Real is float.
  static SPECDEC_INLINE ArrayVec scale_by_power(const ArrayVec& a, const ArrayVec& n) {
    return each([&](int i) {
      if (!(n.v[i] >= -126)) return n.v[i] < -126 ? Real(0) : a.v[i];
      return a.v[i] * bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23);
    });
  }
  SPECDEC_INLINE Real largest() const {
    Real x = v[0];
    for (int i = 1; i < N; ++i) x = larger(x, v[i]);
    return x;
  }
  SPECDEC_INLINE Real sum() const {
    Real x = v[0];
    for (int i = 1; i < N; ++i) x += v[i];
    return x;
  }
  static SPECDEC_INLINE void transpose(ArrayVec (&rows)[N]) {
    for (int i = 0; i < N; ++i) {
      for (int j = 0; j < i; ++j) {
        const Real x = rows[i].v[j];
        rows[i].v[j] = rows[j].v[i];
        rows[j].v[i] = x;
      }
    }
  }

 private:
  static SPECDEC_INLINE double to_real(double x) { return x; }
  template <class T>
  static SPECDEC_INLINE float to_real(T x) {
    return to_float(x);
  }
};

}  // namespace
}  // namespace specdec

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "cpu/vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/vec_avx2.h"
#else
namespace specdec {
namespace {
using FloatVec = ArrayVec<float, 4>;
}  // namespace
}  // namespace specdec
#endif
