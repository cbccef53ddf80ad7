// Fresh tensors. Tensor's own new_empty looks the operator up by name at each call: several microseconds.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>

namespace specdec {

// Contiguous, on the CPU; `dtype` as aoti_torch_dtype_... names it.
inline torch::stable::Tensor empty_cpu(const int64_t* sizes, int dims, int32_t dtype) {
  constexpr int kMaxDims = 16;
  STD_TORCH_CHECK(dims <= kMaxDims, "tensors may have ", kMaxDims, " dimensions, got ", dims);
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int i = dims - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return torch::stable::Tensor(handle);
}

template <int kDims>
torch::stable::Tensor empty_cpu(const int64_t (&sizes)[kDims], int32_t dtype) {
  return empty_cpu(sizes, kDims, dtype);
}

}  // namespace specdec
