// The second wall: Python has validated already and raises the errors users see; these keep a direct call of the op
// from reading out of bounds.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

namespace specdec {

using torch::stable::Tensor;

inline void check_same_device(const char* name, const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() == like.is_cuda() && tensor.get_device_index() == like.get_device_index(), name,
                  " is on another device");
}

inline void check_int32(const char* name, const Tensor& tensor, int64_t dims, int64_t rows) {
  STD_TORCH_CHECK(tensor.scalar_type() == torch::headeronly::ScalarType::Int, name, " must be int32");
  STD_TORCH_CHECK(tensor.dim() == dims && tensor.size(0) == rows, name, " must have ", dims, " dimensions and ", rows,
                  " rows");
}

}  // namespace specdec
