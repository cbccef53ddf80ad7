#include "cpu/medusa_project_kernel.h"

namespace specdec {
namespace medusa {

const Kernel* find_kernel_avx512_bf16(Element element) {
  return element == Element::kBFloat16 ? kernel_for<PairArithmetic, BFloat16>() : nullptr;
}

}  // namespace medusa
}  // namespace specdec
