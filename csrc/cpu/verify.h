// Verification on the CPU: what the parts share. Plain data, no torch.
//
// A row of logits is cut into blocks of kBlock ids. The arithmetic follows these borders and nothing else: not the
// batch, not the threads. Logits become weights exp((logit - largest) / temperature), a block at a time; nothing as
// long as a row is stored.
//
// A row is first summed roughly, in fp32, which is enough for nearly every decision. Only where the error could change
// one, and wherever sums are subtracted or drawn from, is it summed again in double precision.
#pragma once

#include <cstdint>

#include "cpu/element.h"

namespace specdec {
namespace verification {

constexpr int64_t kBlock = 4096;
constexpr double kLn2 = 0.693147180559945309417;

// More than twice the relative error of a rough sum. Three roundings of 2^-24 enter the exponent t of a weight 2^t;
// where such weights matter, |t| <= 31. Up to 256 weights are added to one lane, each sum rounded by 2^-24. Below 2e-5
// in all.
constexpr double kRough = 5e-5;

struct Sums {
  double weight;
  double weight_log2;  // of weight * log2(weight)
};

struct RoughSum {
  double largest;
  double weight;
};

// Of `count` <= kBlock logits side by side. A weight is 2^((logit - largest) * scale), 0 below 2^-1020; its relative
// error is below 3e-12, except in rough sums.
struct RowKernel {
  // Not finite if one is NaN or +inf; -inf and 0 if all are -inf. 2^-100 <= scale <= 2^20. Of the `ahead` logits behind
  // these, a block is fetched into the cache.
  RoughSum (*rough_sum)(const void* logits, int64_t count, double scale, int64_t ahead);
  double (*largest)(const void* logits, int64_t count);                           // NaN if one is NaN or +inf
  Sums (*sums)(const void* logits, int64_t count, double largest, double scale);  // of weights only
  Sums (*entropy_sums)(const void* logits, int64_t count, double largest, double scale);
  void (*weights)(const void* logits, int64_t count, double largest, double scale, double* out);
  int64_t (*find)(const void* logits, int64_t count, double value);  // the first equal one, or count
  double (*sum)(const double* x, int64_t count);
  // x becomes max(x * scale - y * y_scale, 0).
  void (*subtract)(double* x, const double* y, int64_t count, double scale, double y_scale);
};

// The kernel of a translation unit.
const RowKernel* row_kernel_avx512(Element element);
const RowKernel* row_kernel_avx2(Element element);
const RowKernel* row_kernel_plain(Element element);

}  // namespace verification
}  // namespace specdec
