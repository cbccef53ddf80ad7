// The kernel of the including translation unit.
#pragma once

#include "cpu/decoder.h"
#include "cpu/vec.h"

namespace specdec {
namespace decoder {
namespace {

template <class Vec, class T>
struct Row {
  using Real = typename Vec::Real;

  static SPECDEC_INLINE int some(int64_t rest) { return static_cast<int>(smaller<int64_t>(Vec::kLanes, rest)); }
  static SPECDEC_INLINE Vec load(const char* p, int64_t i, int count) {
    return Vec::load_some(reinterpret_cast<const T*>(p) + i, count);
  }
  static SPECDEC_INLINE void store(const Vec& x, char* p, int64_t i, int count) {
    x.store_some(reinterpret_cast<T*>(p) + i, count);
  }
  // x as it is after a detour through memory of type T.
  static SPECDEC_INLINE Vec rounded(const Vec& x) {
    T to[Vec::kLanes];
    x.store_some(to, Vec::kLanes);
    return Vec::load_some(to, Vec::kLanes);
  }

  static SPECDEC_INLINE Real inverse_root(Real x) {
    if constexpr (sizeof(Real) == 8) {
      return 1.0 / __builtin_sqrt(x);
    } else {
      return 1.0f / __builtin_sqrtf(x);
    }
  }

  static void rms_norm(const char* x, const Norm& norm, int64_t width, char* out) {
    Vec squares = Vec::all(0);
    for (int64_t i = 0; i < width; i += Vec::kLanes) {
      const Vec y = load(x, i, some(width - i));
      squares = Vec::fma(y, y, squares);
    }
    const Real mean = squares.sum() / static_cast<Real>(width);
    const Vec factor = Vec::all(inverse_root(mean + static_cast<Real>(norm.eps)));
    for (int64_t i = 0; i < width; i += Vec::kLanes) {
      const int count = some(width - i);
      const Vec y = rounded(load(x, i, count) * factor);
      store(norm.weight ? load(norm.weight, i, count) * y : y, out, i, count);
    }
  }

  // The first half gets x1 cos - x2 sin, the second x2 cos + x1 sin; every product is rounded.
  static void rotate(const char* x, const Norm& norm, const Rotation& r, int64_t head_dim, char* out) {
    if (norm.weight) {
      rms_norm(x, norm, head_dim, out);
      x = out;
    }
    const int64_t half = r.dim / 2;
    for (int64_t i = 0; i < half; i += Vec::kLanes) {
      const int count = some(half - i);
      const Vec low = load(x, i, count), high = load(x, half + i, count);
      const Vec low_cos = rounded(low * load(r.cos, i, count));
      const Vec high_cos = rounded(high * load(r.cos, half + i, count));
      const Vec low_sin = rounded(high * load(r.sin, i, count));
      const Vec high_sin = rounded(low * load(r.sin, half + i, count));
      store(low_cos - low_sin, out, i, count);
      store(high_cos + high_sin, out, half + i, count);
    }
    if (x == out) return;
    __builtin_memcpy(out + r.dim * sizeof(T), x + r.dim * sizeof(T), (head_dim - r.dim) * sizeof(T));
  }

  static const Kernel* kernel() {
    static constexpr Kernel kKernel = {rms_norm, rotate};
    return &kKernel;
  }
};

inline const Kernel* kernel_of(Element element) {
  switch (element) {
    case Element::kBFloat16:
      return Row<FloatVec, BFloat16>::kernel();
    case Element::kHalf:
      return Row<FloatVec, Half>::kernel();
    case Element::kFloat:
      return Row<FloatVec, float>::kernel();
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace decoder
}  // namespace specdec
