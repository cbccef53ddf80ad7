// Tensors to the plain structs of kv_move.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/kv_move.h"

namespace specdec {

// What the CPU and the CUDA kernels of an op must look like: the argument types of its schema.
using KvCompact = void(std::vector<Tensor>, Tensor, Tensor, Tensor, std::optional<Tensor>);
using PagedKvCompact = void(std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>);

inline IndexMatrix as_index_matrix(const Tensor& tensor) {
  return {static_cast<const int32_t*>(tensor.const_data_ptr()), tensor.stride(0),
          tensor.dim() > 1 ? tensor.stride(1) : 0};
}

inline Paths read_paths(const Tensor& accepted, const Tensor& num_accepted, const Tensor& prefix_len,
                        const Tensor* block_table, const std::optional<Tensor>& new_len) {
  const int64_t batch = accepted.dim() == 2 ? accepted.size(0) : -1;
  check_int32("accepted", accepted, 2, batch);
  check_int32("num_accepted", num_accepted, 1, batch);
  check_int32("prefix_len", prefix_len, 1, batch);
  check_same_device("num_accepted", num_accepted, accepted);
  check_same_device("prefix_len", prefix_len, accepted);
  Paths paths{};
  paths.accepted = as_index_matrix(accepted);
  paths.num_accepted = as_index_matrix(num_accepted);
  paths.prefix_len = as_index_matrix(prefix_len);
  paths.batch = static_cast<uint32_t>(batch);
  paths.max_accepted = static_cast<int32_t>(accepted.size(1));
  if (block_table != nullptr) {
    check_int32("block_table", *block_table, 2, batch);
    check_same_device("block_table", *block_table, accepted);
    paths.block_table = as_index_matrix(*block_table);
    paths.max_pages = static_cast<uint32_t>(block_table->size(1));
  }
  if (new_len) {
    check_int32("new_len", *new_len, 1, batch);
    check_same_device("new_len", *new_len, accepted);
    paths.new_len = {static_cast<int32_t*>(new_len->mutable_data_ptr()), new_len->stride(0)};
    STD_TORCH_CHECK(batch == 0 || paths.new_len.data != paths.prefix_len.data, "new_len must not be prefix_len");
  }
  return paths;
}

// (outer, inner), (outer, inner, C) or (outer, inner, H, D), from dimension `first` on. Heads that lie side by side
// become one longer row.
inline Layout read_layout(const Tensor& tensor, int64_t first) {
  const int64_t dims = tensor.dim() - first;
  STD_TORCH_CHECK(dims >= 2 && dims <= 4, "a cache must have 2, 3 or 4 dimensions, got ", dims);
  const int64_t* const sizes = tensor.sizes().data() + first;
  const int64_t* const strides = tensor.strides().data() + first;
  const int64_t width = dims == 2 ? 1 : sizes[dims - 1];
  STD_TORCH_CHECK(width <= 1 || strides[dims - 1] == 1, "a cache must be contiguous in its last dimension");
  const int64_t item = static_cast<int64_t>(tensor.element_size());
  int64_t heads = dims == 4 ? sizes[2] : 1;
  int64_t row_bytes = width * item;
  int64_t head_stride = heads > 1 ? strides[2] * item : 0;
  if (heads > 1 && head_stride == row_bytes) {
    row_bytes *= heads;
    heads = 1;
    head_stride = 0;
  }
  constexpr int64_t kMax = std::numeric_limits<uint32_t>::max();
  STD_TORCH_CHECK(row_bytes <= kMax / 2 && heads <= kMax / 2, "a row of a cache must be below 2 GiB");
  return {strides[0] * item,
          strides[1] * item,
          head_stride,
          static_cast<uint32_t>(std::min(sizes[0], kMax)),
          static_cast<uint32_t>(std::min(sizes[1], kMax)),
          static_cast<uint32_t>(heads),
          static_cast<uint32_t>(row_bytes)};
}

// A tensor of five dimensions is a stack of caches. Caches without a row are left out.
inline std::vector<Cache> read_caches(const std::vector<Tensor>& tensors, const Tensor& accepted, bool paged) {
  std::vector<Cache> caches;
  caches.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    check_same_device("a cache", tensor, accepted);
    const int64_t first = tensor.dim() == 5 ? 1 : 0;
    const Layout layout = read_layout(tensor, first);
    STD_TORCH_CHECK(paged || tensor.size(first) == accepted.size(0), "a cache must have as many rows as accepted");
    if (tensor.numel() == 0) continue;
    char* const data = static_cast<char*>(tensor.mutable_data_ptr());
    const int64_t stack_stride = first ? tensor.stride(0) * static_cast<int64_t>(tensor.element_size()) : 0;
    for (int64_t i = 0; i < (first ? tensor.size(0) : 1); ++i) caches.push_back({data + i * stack_stride, layout});
  }
  return caches;
}

}  // namespace specdec
