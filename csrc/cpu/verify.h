// Verification on the CPU: what the parts share. Plain data, no torch.
//
// A row of logits is cut into blocks of kBlock ids. The arithmetic follows these borders and nothing else: not the
// batch, not the threads. Logits become weights exp((logit - largest) / temperature) in double precision, a block at a
// time; nothing as long as a row is stored.
#pragma once

#include <cstdint>

#include "cpu/element.h"

namespace specdec {
namespace verification {

constexpr int64_t kBlock = 4096;

struct Sums {
  double weight;
  double weight_log2;  // of weight * log2(weight)
};

// Of `count` <= kBlock logits side by side. A weight is 2^((logit - largest) * scale), 0 below 2^-1020; its relative
// error is below 3e-12.
struct RowKernel {
  double (*largest)(const void* logits, int64_t count);                           // NaN if one is NaN or +inf
  Sums (*sums)(const void* logits, int64_t count, double largest, double scale);  // of weights only
  Sums (*entropy_sums)(const void* logits, int64_t count, double largest, double scale);
  void (*weights)(const void* logits, int64_t count, double largest, double scale, double* out);
  int64_t (*find)(const void* logits, int64_t count, double value);  // the first equal one, or count
};

// The kernel of a translation unit.
const RowKernel* row_kernel_avx512(Element element);
const RowKernel* row_kernel_avx2(Element element);
const RowKernel* row_kernel_plain(Element element);

}  // namespace verification
}  // namespace specdec
