#include "cpu/tree_attention_kernel.h"

namespace specdec {
namespace attention {

const Kernel* find_kernel_avx512(Element q, Element) {
  return q == Element::kDouble ? nullptr : kernel_of<FmaArithmetic<FloatVec>>();
}

}  // namespace attention
}  // namespace specdec
