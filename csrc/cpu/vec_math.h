// exp and tanh over vectors: the same polynomial in every lane, on every instruction set.
#pragma once

#include "cpu/vec.h"

namespace specdec {
namespace {

// e^x for x <= 80, relative error below 1e-8 before rounding; exactly 1 at 0. Below the smallest normal number the
// result is 0 or subnormal. NaN stays NaN.
template <class Vec>
SPECDEC_INLINE Vec exp(const Vec& any) {
  if constexpr (sizeof(typename Vec::Real) == 8) {
    return Vec::each([&](int i) { return __builtin_exp(any.v[i]); });
  } else {
    // x = (n + f) ln 2 with n whole and |f| <= 1/2; 2^f by a minimax polynomial.
    const Vec x = Vec::max(Vec::all(-150.0f), any);
    const Vec log2e = Vec::all(0x1.715476p+0f);
    const Vec n = Vec::round(x * log2e);
    Vec f = Vec::fma(x, log2e, Vec::all(0.0f) - n);
    f = Vec::fma(x, Vec::all(0x1.4ae0cp-26f), f);  // the rest of log2(e)
    Vec p = Vec::fma(Vec::all(1.535336182e-04f), f, Vec::all(1.339887445e-03f));
    p = Vec::fma(p, f, Vec::all(9.618437358e-03f));
    p = Vec::fma(p, f, Vec::all(5.550332471e-02f));
    p = Vec::fma(p, f, Vec::all(2.402264791e-01f));
    p = Vec::fma(p, f, Vec::all(6.931472029e-01f));
    return Vec::scale_by_power(Vec::fma(p, f, Vec::all(1.0f)), n);
  }
}

template <class Vec>
SPECDEC_INLINE Vec tanh(const Vec& x) {
  if constexpr (sizeof(typename Vec::Real) == 8) {
    return Vec::each([&](int i) { return __builtin_tanh(x.v[i]); });
  } else {
    // Near 0: x + x^3 P(x^2). Elsewhere: 1 - 2 / (e^|2x| + 1).
    const Vec square = x * x;
    Vec p = Vec::fma(Vec::all(-5.704986327e-03f), square, Vec::all(2.063908657e-02f));
    p = Vec::fma(p, square, Vec::all(-5.373971485e-02f));
    p = Vec::fma(p, square, Vec::all(1.333144219e-01f));
    p = Vec::fma(p, square, Vec::all(-3.333328194e-01f));
    const Vec small = Vec::fma(p * square, x, x);
    const Vec twice = Vec::max(Vec::all(-40.0f), Vec::copy_sign(x + x, Vec::all(-1.0f)));
    const Vec below = exp(twice);  // e^-|2x|
    const Vec large = (Vec::all(1.0f) - below) / (Vec::all(1.0f) + below);
    return Vec::if_below(x, 0.625f, small, Vec::copy_sign(large, x));
  }
}

}  // namespace
}  // namespace specdec
