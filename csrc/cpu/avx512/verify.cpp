#include "cpu/verify_kernel.h"

namespace specdec {
namespace verification {

const RowKernel* row_kernel_avx512(Element element) { return kernel_of(element); }

}  // namespace verification
}  // namespace specdec
