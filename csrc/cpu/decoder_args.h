// Tensors to the plain structs of decoder.h and decoder_write.h.
#pragma once

#include <optional>

#include "common/check.h"
#include "cpu/decoder_write.h"
#include "cpu/rows.h"

namespace specdec {
namespace decoder {

// The best kernel of the instruction sets that may be used.
const Kernel& find_kernel(Element element);

// Strides in bytes.
inline int64_t stride_of(const Tensor& tensor, int64_t dim) {
  return tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
}

inline Norm norm_of(const char* name, const std::optional<Tensor>& weight, double eps, int64_t width, const Tensor& x) {
  if (!weight) return {nullptr, 0};
  check_rows_like(name, *weight, x);
  STD_TORCH_CHECK(weight->dim() == 1 && weight->size(0) == width, name, " must have shape (", width, ",)");
  return {static_cast<const char*>(weight->const_data_ptr()), eps};
}

inline Heads heads_of(const char* name, const Tensor& tensor, const Tensor& like, int64_t rows) {
  STD_TORCH_CHECK(tensor.dim() == 4, name, " must have 4 dimensions, got ", tensor.dim());
  check_rows_like(name, tensor, like);
  STD_TORCH_CHECK(tensor.size(0) == rows && tensor.size(3) == like.size(3), name, " must have shape (", rows,
                  ", S, Hk, ", like.size(3), ")");
  return {static_cast<char*>(tensor.mutable_data_ptr()),
          {stride_of(tensor, 0), stride_of(tensor, 1), stride_of(tensor, 2)}};
}

inline Angles angles_of(const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& qkv) {
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "both or none of cos and sin must be given");
  if (!cos) return {};
  for (const Tensor* angles : {&*cos, &*sin}) {
    check_rows_like("cos and sin", *angles, qkv);
    STD_TORCH_CHECK(angles->dim() == 3 && (angles->size(0) == 1 || angles->size(0) == qkv.size(0)) &&
                        angles->size(1) == qkv.size(1) && angles->size(2) <= qkv.size(3) && angles->size(2) % 2 == 0,
                    "cos and sin must have shape (B or 1, T, even and at most D)");
    for (int64_t dim = 0; dim < 3; ++dim) {
      STD_TORCH_CHECK(
          angles->size(dim) == cos->size(dim) && (angles->size(dim) <= 1 || angles->stride(dim) == cos->stride(dim)),
          "cos and sin must be alike");
    }
  }
  return {static_cast<const char*>(cos->const_data_ptr()),
          static_cast<const char*>(sin->const_data_ptr()),
          {cos->size(0) == 1 ? 0 : stride_of(*cos, 0), stride_of(*cos, 1)},
          cos->size(2)};
}

// A `Write` without its tensors, for qkv (B, T, heads, D) and caches (num_slots, capacity, num_kv_heads, D).
inline Write places_of(const Tensor& qkv, const Tensor& prefix_len, const std::optional<Tensor>& slots,
                       int64_t num_slots, int64_t capacity, int64_t num_kv_heads) {
  Write write{};
  check_int32("prefix_len", prefix_len, 1, qkv.size(0));
  write.lengths = static_cast<const int32_t*>(prefix_len.const_data_ptr());
  write.length_stride = prefix_len.stride(0);
  if (slots) {
    check_int32("slots", *slots, 1, qkv.size(0));
    write.slots = static_cast<const int32_t*>(slots->const_data_ptr());
    write.slot_stride = slots->stride(0);
  }
  write.num_nodes = qkv.size(1);
  write.num_kv_heads = num_kv_heads;
  write.num_q_heads = qkv.size(2) - 2 * num_kv_heads;
  write.head_dim = qkv.size(3);
  write.head_bytes = write.head_dim * static_cast<int64_t>(qkv.element_size());
  write.num_slots = slots ? num_slots : qkv.size(0);
  write.capacity = capacity;
  return write;
}

}  // namespace decoder
}  // namespace specdec
