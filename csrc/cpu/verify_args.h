// Tensors to the plain structs of verify_walk.h.
#pragma once

#include <memory>
#include <optional>

#include "cpu/element_of.h"
#include "cpu/isa.h"
#include "cpu/verify_walk.h"

namespace specdec {
namespace verification {

using torch::headeronly::ScalarType;

inline const RowKernel* find_row_kernel(Element element) {
#if defined(__x86_64__)
  const IsaLevel level = isa_level();
  if (level >= IsaLevel::kAvx512) return row_kernel_avx512(element);
  if (level >= IsaLevel::kAvx2) return row_kernel_avx2(element);
#endif
  return row_kernel_plain(element);
}

inline void check_kind(const char* name, const Tensor& tensor, ScalarType type, int64_t dims, const Tensor& like) {
  check_same_device(name, tensor, like);
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " has the wrong dtype");
  STD_TORCH_CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions, got ", tensor.dim());
}

// (batch, nodes, size); nodes >= `num_nodes`.
inline Logits read_logits(const char* name, const Tensor& tensor, int64_t batch, int64_t num_nodes, const Tensor& like,
                          int64_t* batch_stride) {
  check_same_device(name, tensor, like);
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) == batch && tensor.size(1) >= num_nodes && tensor.size(2) >= 1,
                  name, " must have shape (", batch, ", ", num_nodes, ", V)");
  STD_TORCH_CHECK(tensor.size(2) == 1 || tensor.stride(2) == 1, name, " must be contiguous in its last dimension");
  const int64_t bytes = static_cast<int64_t>(tensor.element_size());
  *batch_stride = tensor.stride(0) * bytes;
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.stride(1) * bytes, bytes, tensor.size(2),
          find_row_kernel(floating_element_of(name, tensor))};
}

// One call: the problem, and what it points to.
struct Call {
  Problem problem{};
  std::unique_ptr<DraftVocab> draft_vocab;
};

inline void read_ids(const char* name, const Tensor& ids, const Tensor& target_logits, bool has_root, Call* call) {
  check_kind(name, ids, ScalarType::Long, 2, target_logits);
  Problem& p = call->problem;
  p.batch = ids.size(0);
  p.num_nodes = ids.size(1) + (has_root ? 0 : 1);
  STD_TORCH_CHECK(p.num_nodes >= 1 && p.num_nodes < (int64_t{1} << 31), name, " must have a root");
  p.ids = static_cast<const int64_t*>(ids.const_data_ptr());
  p.ids_strides[0] = ids.stride(0);
  p.ids_strides[1] = ids.stride(1);
  p.first_id_node = has_root ? 0 : 1;
  p.target = read_logits("target_logits", target_logits, p.batch, p.num_nodes, ids, &p.target_batch_stride);
  p.vocab = p.target.size;
}

inline void read_parents(const Tensor& parents, const Tensor& ids, Call* call) {
  Problem& p = call->problem;
  check_kind("parents", parents, ScalarType::Int, 2, ids);
  STD_TORCH_CHECK((parents.size(0) == 1 || parents.size(0) == p.batch) && parents.size(1) == p.num_nodes,
                  "parents must have shape (", p.batch, " or 1, ", p.num_nodes, ")");
  p.parents = static_cast<const int32_t*>(parents.const_data_ptr());
  p.parents_strides[0] = parents.size(0) == 1 ? 0 : parents.stride(0);
  p.parents_strides[1] = parents.stride(1);
}

inline void read_lengths(const char* name, const std::optional<Tensor>& lengths, int64_t offset, const Tensor& ids,
                         Call* call) {
  if (!lengths) return;
  Problem& p = call->problem;
  check_int32(name, *lengths, 1, p.batch);
  check_same_device(name, *lengths, ids);
  p.lengths = static_cast<const int32_t*>(lengths->const_data_ptr());
  p.lengths_stride = lengths->stride(0);
  p.length_offset = offset;
}

inline void read_draft(const std::optional<Tensor>& logits, const std::optional<Tensor>& offsets, const Tensor& ids,
                       bool has_root, Call* call) {
  Problem& p = call->problem;
  const int64_t num_laws = has_root ? p.num_nodes : p.num_nodes - 1;
  // Without drafts there is nothing to read; not even the shape of a row matters.
  if (!logits || num_laws == 0) return;
  p.draft = read_logits("draft_logits", *logits, p.batch, num_laws, ids, &p.draft_batch_stride);
  if (!offsets) {
    STD_TORCH_CHECK(p.draft.size == p.vocab, "draft_logits must have ", p.vocab, " ids, got ", p.draft.size);
    return;
  }
  check_kind("draft_vocab_map", *offsets, ScalarType::Long, 1, ids);
  STD_TORCH_CHECK(offsets->size(0) == p.draft.size, "draft_vocab_map must have ", p.draft.size, " offsets");
  call->draft_vocab = std::make_unique<DraftVocab>(static_cast<const int64_t*>(offsets->const_data_ptr()),
                                                   offsets->stride(0), p.draft.size, p.vocab);
  p.draft_vocab = call->draft_vocab.get();
}

inline void read_randomness(const Tensor& temperature, const Tensor& uniforms, const Tensor& ids, Call* call) {
  Problem& p = call->problem;
  check_kind("temperature", temperature, ScalarType::Float, 1, ids);
  STD_TORCH_CHECK(temperature.size(0) == p.batch, "temperature must have ", p.batch, " elements");
  const bool is_double = uniforms.scalar_type() == ScalarType::Double;
  check_kind("uniforms", uniforms, is_double ? ScalarType::Double : ScalarType::Float, 2, ids);
  STD_TORCH_CHECK(uniforms.size(0) == p.batch && uniforms.size(1) == p.num_nodes, "uniforms must have shape (", p.batch,
                  ", ", p.num_nodes, ")");
  p.temperature = static_cast<const float*>(temperature.const_data_ptr());
  p.temperature_stride = temperature.stride(0);
  p.uniforms = is_double ? nullptr : static_cast<const float*>(uniforms.const_data_ptr());
  p.uniforms64 = is_double ? static_cast<const double*>(uniforms.const_data_ptr()) : nullptr;
  p.uniforms_strides[0] = uniforms.stride(0);
  p.uniforms_strides[1] = uniforms.stride(1);
}

}  // namespace verification
}  // namespace specdec
