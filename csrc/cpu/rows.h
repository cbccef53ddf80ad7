// Tensors seen as rows: (..., C).
#pragma once

#include <vector>

#include "common/check.h"
#include "common/empty.h"

namespace specdec {

inline void check_rows_like(const char* name, const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), name, " must have the dtype of the first argument");
  check_same_device(name, tensor, like);
  STD_TORCH_CHECK(tensor.dim() >= 1, name, " must have a dimension");
  const int64_t last = tensor.dim() - 1;
  STD_TORCH_CHECK(tensor.size(last) <= 1 || tensor.numel() == 0 || tensor.stride(last) == 1, name,
                  " must be contiguous in its last dimension");
}

// Where the rows lie, in order.
inline std::vector<const char*> rows_of(const Tensor& tensor) {
  const int64_t item = static_cast<int64_t>(tensor.element_size());
  std::vector<const char*> rows{static_cast<const char*>(tensor.const_data_ptr())};
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    std::vector<const char*> inner;
    inner.reserve(rows.size() * tensor.size(dim));
    for (const char* row : rows) {
      for (int64_t i = 0; i < tensor.size(dim); ++i) inner.push_back(row + i * tensor.stride(dim) * item);
    }
    rows = std::move(inner);
  }
  return rows;
}

// Of the tensor's shape and dtype, but for the last dimension.
inline Tensor empty_like_rows(const Tensor& tensor, int64_t width) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) sizes.push_back(tensor.size(dim));
  sizes.push_back(width);
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return empty_cpu(sizes.data(), static_cast<int>(sizes.size()), dtype);
}

}  // namespace specdec
