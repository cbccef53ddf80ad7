// This machine, as the products want to know it.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <functional>

#include "cpu/medusa_project_call.h"

namespace specdec {
namespace medusa {

// The best kernel of the instruction sets that may be used; null for quantised elements.
const Kernel* find_kernel(Element element);

inline Machine this_machine(Element element) {
  return {find_kernel(element), torch::stable::get_num_threads(),
          [](int64_t workers, const std::function<void(int64_t)>& body) {
            torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
              for (int64_t worker = begin; worker < end; ++worker) body(worker);
            });
          }};
}

}  // namespace medusa
}  // namespace specdec
