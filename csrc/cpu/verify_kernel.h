// Statistics of a block of logits, for the instruction set of the translation unit that includes this.
#pragma once

#include "cpu/vec_math.h"
#include "cpu/verify.h"
#include "cpu/verify_wide.h"

namespace specdec {
namespace verification {
namespace {

// Compares in the type of the logits: vectors of fp32, and of doubles for doubles.
struct WideVec {
  static constexpr int kLanes = kWide;
  Wide v;

  static SPECDEC_INLINE WideVec all(double x) { return {wide(x)}; }
  static SPECDEC_INLINE WideVec load_some(const double* p, int) {
    WideVec to;
    std::memcpy(&to.v, p, sizeof(to.v));
    return to;
  }
  static SPECDEC_INLINE WideVec fma(WideVec a, WideVec b, WideVec c) { return {verification::fma(a.v, b.v, c.v)}; }
  static SPECDEC_INLINE WideVec max(WideVec a, WideVec b) { return {verification::max(a.v, b.v)}; }
  SPECDEC_INLINE double sum() const { return verification::sum(v); }
  SPECDEC_INLINE double largest() const {
    double x = v[0];
    for (int i = 1; i < kWide; ++i) x = larger(x, static_cast<double>(v[i]));
    return x;
  }
};
template <class T>
struct ComparedAs {
  using Vec = FloatVec;
};
template <>
struct ComparedAs<double> {
  using Vec = WideVec;
};

template <class T>
double largest(const void* logits, int64_t count) {
  using Vec = typename ComparedAs<T>::Vec;
  constexpr int kStep = 2 * Vec::kLanes;
  const T* const p = static_cast<const T*>(logits);
  const Vec lowest = Vec::all(sizeof(T) == 8 ? -0x1p1000 : -0x1p127), zero = Vec::all(0);
  Vec a = Vec::all(-__builtin_inf()), b = a, taint_a = zero, taint_b = zero;
  const auto add = [&](const Vec& x, Vec* most, Vec* taint) {
    *most = Vec::max(x, *most);
    // 0 * NaN and 0 * inf are NaN; -inf is allowed.
    *taint = Vec::fma(Vec::max(lowest, x), zero, *taint);
  };
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    add(Vec::load_some(p + i, Vec::kLanes), &a, &taint_a);
    add(Vec::load_some(p + i + Vec::kLanes, Vec::kLanes), &b, &taint_b);
  }
  double most = Vec::max(a, b).largest(), taint = taint_a.sum() + taint_b.sum();
  for (; i < count; ++i) {
    const double x = to_double(p[i]);
    taint += (x == x && x < __builtin_inf()) ? 0.0 : __builtin_nan("");
    most = larger(most, x);
  }
  return taint == taint ? most : taint;
}

SPECDEC_INLINE Wide exponent(Wide x, double largest, double scale) { return (x - largest) * scale; }

template <class T, bool kLogs>
Sums sums(const void* logits, int64_t count, double largest, double scale) {
  const T* const p = static_cast<const T*>(logits);
  Wide weights = wide(0), logs = wide(0);
  const auto add = [&](Wide x) {
    const Wide t = exponent(x, largest, scale), w = exp2(t);
    weights += w;
    if constexpr (kLogs) logs = fma(w, max(wide(-1100.0), t), logs);
  };
  int64_t i = 0;
  for (; i + kPerStep <= count; i += kPerStep) {
    const Pair x = load(p + i);
    add(x.low);
    add(x.high);
  }
  for (; i < count; ++i) {
    Wide x = wide(-__builtin_inf());
    x[0] = to_double(p[i]);
    add(x);
  }
  return {sum(weights), sum(logs)};
}

// e^(x / kUnit) in fp32; 0 for -inf, NaN for NaN.
#if SPECDEC_WIDE == 8
constexpr double kUnit = 1.4426950408889634;  // log2(e)
SPECDEC_INLINE FloatVec rough_power(FloatVec x) { return FloatVec::exp2(x); }
#else
constexpr double kUnit = 1.0;
SPECDEC_INLINE FloatVec rough_power(const FloatVec& x) { return exp(x); }
#endif

template <class T, class Body>
SPECDEC_INLINE void each_vec(const T* p, int64_t count, const Body& body) {
  constexpr int kLanes = FloatVec::kLanes;
  const FloatVec none = FloatVec::all(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    SPECDEC_UNROLL_LOOP
    for (int k = 0; k < 4; ++k) body(k, i + k * kLanes, FloatVec::load_some(p + i + k * kLanes, kLanes));
  }
  for (; i < count; i += kLanes) {
    const int left = static_cast<int>(smaller<int64_t>(count - i, kLanes));
    body(0, i, FloatVec::inside(0, left, FloatVec::load_some(p + i, left), none));
  }
}

template <class T>
RoughSum rough_sum(const void* logits, int64_t count, double scale, int64_t ahead) {
  const T* const p = static_cast<const T*>(logits);
  FloatVec most[4], sums[4];
  for (int k = 0; k < 4; ++k) {
    most[k] = FloatVec::all(-__builtin_inff());
    sums[k] = FloatVec::all(0.0f);
  }
  each_vec(p, count, [&](int k, int64_t, const FloatVec& x) { most[k] = FloatVec::max(x, most[k]); });
  const float top = FloatVec::max(FloatVec::max(most[0], most[1]), FloatVec::max(most[2], most[3])).largest();
  // The largest of NaN and -inf is -inf here.
  if (!(top > -__builtin_inff())) return {largest<T>(logits, count), 0.0};
  const FloatVec shift = FloatVec::all(top), factor = FloatVec::all(static_cast<float>(scale * (kUnit * kLn2)));
  each_vec(p, count, [&](int k, int64_t i, const FloatVec& x) {
    if (i < ahead) __builtin_prefetch(p + count + i);
    sums[k] = sums[k] + rough_power((x - shift) * factor);
  });
  const double total = ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
  return {total == total ? static_cast<double>(top) : total, total};
}
template <>
RoughSum rough_sum<double>(const void* logits, int64_t count, double scale, int64_t) {
  const double top = largest<double>(logits, count);
  const bool is_finite = top - top == 0;
  return {top, is_finite ? sums<double, false>(logits, count, top, scale).weight : 0.0};
}

template <class T>
void weights(const void* logits, int64_t count, double largest, double scale, double* out) {
  const T* const p = static_cast<const T*>(logits);
  int64_t i = 0;
  for (; i + kPerStep <= count; i += kPerStep) {
    const Pair x = load(p + i);
    const Wide both[2] = {exp2(exponent(x.low, largest, scale)), exp2(exponent(x.high, largest, scale))};
    std::memcpy(out + i, both, sizeof(both));
  }
  for (; i < count; ++i) out[i] = exp2(exponent(wide(to_double(p[i])), largest, scale))[0];
}

template <class T>
int64_t find(const void* logits, int64_t count, double value) {
  const T* const p = static_cast<const T*>(logits);
  int64_t i = 0;
  while (i < count && to_double(p[i]) != value) ++i;
  return i;
}

inline double sum_of(const double* x, int64_t count) {
  Wide low = wide(0), high = wide(0);
  int64_t i = 0;
  for (; i + kPerStep <= count; i += kPerStep) {
    const Pair pair = load(x + i);
    low += pair.low;
    high += pair.high;
  }
  double total = sum(low + high);
  for (; i < count; ++i) total += x[i];
  return total;
}

inline void subtract(double* x, const double* y, int64_t count, double scale, double y_scale) {
  int64_t i = 0;
  for (; i + kPerStep <= count; i += kPerStep) {
    const Pair a = load(x + i), b = load(y + i);
    const Wide rest[2] = {max(a.low * scale - b.low * y_scale, wide(0)),
                          max(a.high * scale - b.high * y_scale, wide(0))};
    std::memcpy(x + i, rest, sizeof(rest));
  }
  for (; i < count; ++i) {
    const double rest = x[i] * scale - y[i] * y_scale;
    x[i] = rest > 0 ? rest : 0;
  }
}

template <class T>
const RowKernel* kernel_for() {
  static constexpr RowKernel kKernel = {rough_sum<T>, largest<T>, sums<T, false>, sums<T, true>,
                                        weights<T>,   find<T>,    sum_of,         subtract};
  return &kKernel;
}

inline const RowKernel* kernel_of(Element element) {
  switch (element) {
    case Element::kBFloat16:
      return kernel_for<BFloat16>();
    case Element::kHalf:
      return kernel_for<Half>();
    case Element::kDouble:
      return kernel_for<double>();
    default:
      return kernel_for<float>();
  }
}

}  // namespace
}  // namespace verification
}  // namespace specdec
