#include "cpu/tree_attention_kernel.h"

namespace specdec {
namespace attention {

const Kernel* find_kernel_avx512_bf16(Element q, Element) {
  return q == Element::kBFloat16 ? kernel_of<PairArithmetic>() : nullptr;
}

}  // namespace attention
}  // namespace specdec
