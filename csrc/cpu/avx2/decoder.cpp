#include "cpu/decoder_kernel.h"

namespace specdec {
namespace decoder {

const Kernel* find_kernel_avx2(Element element) { return kernel_of(element); }

}  // namespace decoder
}  // namespace specdec
