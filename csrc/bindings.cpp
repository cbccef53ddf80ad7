// What Python may ask about this build; the kernels themselves are reached through the dispatcher.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/headeronly/version.h>

#include <map>
#include <string>

#include "common/register.h"
#include "cpu/isa.h"

namespace specdec {
namespace {

std::map<std::string, std::string> build_info() {
#if defined(__clang__)
  const std::string compiler = "clang " __VERSION__;
#else
  const std::string compiler = "gcc " __VERSION__;
#endif
  return {{"compiler", compiler}, {"flags", SPECDEC_CXX_FLAGS}, {"torch", TORCH_VERSION}, {"isa", compiled_isa()}};
}

}  // namespace
}  // namespace specdec

PYBIND11_MODULE(_C, m) {
  m.doc() = "CPU kernels of specdec_kernels; importing registers them.";
  m.def("build_info", &specdec::build_info, "Compiler, flags, torch version and instruction set of this build.");
  m.def("cpu_isa", &specdec::cpu_isa, "Instruction sets of this machine that matter here, best last.");
  m.def("limit_isa", &specdec::limit_isa,
        "Let kernels use at most this level: plain, avx2, avx512, avx512_bf16; anything else: the machine's best.");
  m.def("schemas", &specdec::native_schemas, "Op name -> argument types of its native kernel, as torch prints them.");
}
