// What a decoder layer does between its linear layers, on the CPU: what the parts share. Plain data, no torch.
#pragma once

#include <cstdint>

#include "cpu/element.h"

namespace specdec {
namespace decoder {

// Of one row; every result depends on this row only. Sums and roots are at least fp32.
struct Norm {
  const char* weight;
  double eps;
};

// The rotary embedding of one token; `dim` is 0 where there is none.
struct Rotation {
  const char* cos;
  const char* sin;
  int64_t dim;
};

struct Kernel {
  // out = weight * round(x / rms); a null weight is all ones.
  void (*rms_norm)(const char* x, const Norm& norm, int64_t width, char* out);
  // out = a head after its norm, if it has one, and the rotation of its first numbers; `out` may be x.
  void (*rotate)(const char* x, const Norm& norm, const Rotation& rotation, int64_t head_dim, char* out);
};

// The kernel of a translation unit, or null when it has none for this element.
const Kernel* find_kernel_avx512(Element element);
const Kernel* find_kernel_avx2(Element element);
const Kernel* find_kernel_plain(Element element);

}  // namespace decoder
}  // namespace specdec
