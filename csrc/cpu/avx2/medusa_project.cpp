#include "cpu/medusa_project_kernel.h"

namespace specdec {
namespace medusa {

const Kernel* find_kernel_avx2(Element element) { return kernel_of(element); }

}  // namespace medusa
}  // namespace specdec
