// The kernel of the including translation unit: products, and what becomes of them.
#pragma once

#include "cpu/medusa_project_rank.h"
#include "cpu/medusa_project_tile.h"
#include "cpu/vec_math.h"

namespace specdec {
namespace medusa {
namespace {

// x * sigmoid(x). Beyond 80 the exponential is out of range and the factor 1 or 0; NaN stays, and 0 * -inf is one.
template <class Vec>
SPECDEC_INLINE Vec silu(const Vec& x) {
  const Vec half = Vec::all(0.5f), one = Vec::all(1.0f);
  const Vec inner = x / (one + exp(Vec::all(0.0f) - x));
  return Vec::if_below(x, 80.0f, inner, x * (Vec::copy_sign(half, x) + half));
}

template <class A, class T>
void finish_layer(const void* products, const char* bias, const char* x, int64_t count, char* out) {
  using Vec = typename A::Vec;
  const auto* const sums = static_cast<const typename A::Real*>(products);
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const int some = static_cast<int>(smaller<int64_t>(Vec::kLanes, count - i));
    Vec y = Vec::load_some(sums + i, some);
    if (bias) y = y + Vec::load_some(reinterpret_cast<const T*>(bias) + i, some);
    y = Vec::load_some(reinterpret_cast<const T*>(x) + i, some) + silu(y);
    y.store_some(reinterpret_cast<T*>(out) + i, some);
  }
}

// x as it is after a detour through memory of type T.
template <class T, class Vec>
SPECDEC_INLINE Vec rounded(const Vec& x) {
  if constexpr (sizeof(T) == sizeof(typename Vec::Real)) {
    return x;
  } else {
    if constexpr (requires { x.rounded_to(static_cast<const T*>(nullptr)); }) {
      return x.rounded_to(static_cast<const T*>(nullptr));
    } else {
      T some[Vec::kLanes];
      x.store_some(some, Vec::kLanes);
      return Vec::load_some(some, Vec::kLanes);
    }
  }
}

template <class A, class T>
SPECDEC_INLINE typename A::Vec load_sum(const void* products, const char* bias, int64_t i, int some) {
  using Vec = typename A::Vec;
  const Vec sum = Vec::load_some(static_cast<const typename A::Real*>(products) + i, some);
  return bias ? sum + Vec::load_some(reinterpret_cast<const T*>(bias) + i, some) : sum;
}

template <class A, class T>
void finish_linear(const void* products, const char* bias, const char* residual, int64_t count, char* out) {
  using Vec = typename A::Vec;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const int some = static_cast<int>(smaller<int64_t>(Vec::kLanes, count - i));
    Vec y = load_sum<A, T>(products, bias, i, some);
    if (residual) y = Vec::load_some(reinterpret_cast<const T*>(residual) + i, some) + rounded<T>(y);
    y.store_some(reinterpret_cast<T*>(out) + i, some);
  }
}

template <class A, class T>
void finish_gated(const void* gate, const char* gate_bias, const void* up, const char* up_bias, int64_t count,
                  char* out) {
  using Vec = typename A::Vec;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const int some = static_cast<int>(smaller<int64_t>(Vec::kLanes, count - i));
    const Vec opened = rounded<T>(silu(rounded<T>(load_sum<A, T>(gate, gate_bias, i, some))));
    const Vec y = opened * rounded<T>(load_sum<A, T>(up, up_bias, i, some));
    y.store_some(reinterpret_cast<T*>(out) + i, some);
  }
}

template <class A, class T>
void store(const void* products, int64_t count, char* out) {
  using Vec = typename A::Vec;
  const auto* const sums = static_cast<const typename A::Real*>(products);
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const int some = static_cast<int>(smaller<int64_t>(Vec::kLanes, count - i));
    Vec::load_some(sums + i, some).store_some(reinterpret_cast<T*>(out) + i, some);
  }
}

SPECDEC_INLINE LogSum log_sum(const float* logits, int64_t count) {
  using Vec = FloatVec;
  constexpr int kLanes = Vec::kLanes;
  constexpr float kInfinity = __builtin_inff(), kLargest = 0x1.fffffep127f;
  Vec most = Vec::all(-kInfinity);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int some = static_cast<int>(smaller<int64_t>(kLanes, count - i));
    most = Vec::max(Vec::inside(0, some, Vec::load_some(logits + i, some), most), most);  // NaN is passed over
  }
  const float shift = larger(-kLargest, smaller(kLargest, most.largest()));
  Vec sum = Vec::all(0);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int some = static_cast<int>(smaller<int64_t>(kLanes, count - i));
    const Vec power = exp(Vec::load_some(logits + i, some) - Vec::all(shift));
    sum = sum + Vec::inside(0, some, power, Vec::all(0));
  }
  if (most.largest() < kInfinity) return {shift, sum.sum()};
  float total = kInfinity;  // exp does not know infinity; a NaN wins over it
  for (int64_t i = 0; i < count; ++i) total = logits[i] == logits[i] ? total : logits[i];
  return {shift, total};
}

template <class A, class T>
LogSum rank(const void* products, int64_t count, int64_t first_id, int64_t* keys, int64_t k) {
  T rounded[kChunk];
  store<A, T>(products, count, reinterpret_cast<char*>(rounded));
  float logits[kChunk] = {};
  for (int64_t i = 0; i < count; i += FloatVec::kLanes) {
    const int some = static_cast<int>(smaller<int64_t>(FloatVec::kLanes, count - i));
    if constexpr (sizeof(T) == 8) {
      for (int lane = 0; lane < some; ++lane) logits[i + lane] = static_cast<float>(rounded[i + lane]);
    } else {
      FloatVec::load_some(rounded + i, some).store(logits + i);
    }
  }
  offer_all(logits, count, first_id, keys, k);
  return log_sum(logits, count);
}

template <class A, class T>
const Kernel* kernel_for() {
  static constexpr Kernel kKernel = {operand_bytes<A>,    pack<A, T>,         multiply<A, T>, finish_layer<A, T>,
                                     finish_linear<A, T>, finish_gated<A, T>, store<A, T>,    rank<A, T>};
  return &kKernel;
}

inline const Kernel* kernel_of(Element element) {
  switch (element) {
    case Element::kBFloat16:
      return kernel_for<SingleArithmetic<FloatVec>, BFloat16>();
    case Element::kHalf:
      return kernel_for<SingleArithmetic<FloatVec>, Half>();
    case Element::kFloat:
      return kernel_for<SingleArithmetic<FloatVec>, float>();
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace medusa
}  // namespace specdec
