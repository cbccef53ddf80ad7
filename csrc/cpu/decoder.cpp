#include "cpu/decoder.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/empty.h"
#include "common/register.h"
#include "cpu/decoder_kernel.h"
#include "cpu/element_of.h"
#include "cpu/isa.h"
#include "cpu/rows.h"

namespace specdec {
namespace decoder {

const Kernel* find_kernel_plain(Element element) {
  return element == Element::kDouble ? Row<ArrayVec<double, 4>, double>::kernel() : kernel_of(element);
}

namespace {

const Kernel& find_kernel(Element element) {
  const Kernel* kernel = nullptr;
#if defined(__x86_64__)
  const IsaLevel level = isa_level();
  if (level >= IsaLevel::kAvx512) kernel = find_kernel_avx512(element);
  if (!kernel && level >= IsaLevel::kAvx2) kernel = find_kernel_avx2(element);
#endif
  return *(kernel ? kernel : find_kernel_plain(element));
}

// Numbers that a thread should have at least: waking it costs about as much as they do.
constexpr int64_t kNumbersPerThread = 64 << 10;

// Strides in bytes.
int64_t stride_of(const Tensor& tensor, int64_t dim) {
  return tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
}

Norm norm_of(const char* name, const std::optional<Tensor>& weight, double eps, int64_t width, const Tensor& x) {
  if (!weight) return {nullptr, 0};
  check_rows_like(name, *weight, x);
  STD_TORCH_CHECK(weight->dim() == 1 && weight->size(0) == width, name, " must have shape (", width, ",)");
  return {static_cast<const char*>(weight->const_data_ptr()), eps};
}

Tensor rms_norm_cpu(Tensor x, Tensor weight, double eps) {
  const Element element = floating_element_of("x", x);
  check_rows_like("x", x, x);
  const int64_t width = x.size(x.dim() - 1);
  const Norm norm = norm_of("weight", weight, eps, width, x);
  const std::vector<const char*> rows = rows_of(x);
  Tensor out = empty_like_rows(x, width);
  if (rows.empty() || width == 0) return out;
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  const Kernel& kernel = find_kernel(element);
  const int64_t row_bytes = width * bytes_of(element);
  torch::stable::parallel_for(0, static_cast<int64_t>(rows.size()), kNumbersPerThread / width + 1,
                              [&](int64_t begin, int64_t end) {
                                for (int64_t row = begin; row < end; ++row) {
                                  kernel.rms_norm(rows[row], norm, width, to + row * row_bytes);
                                }
                              });
  return out;
}

// One of the tensors of a step: (batch, rows, heads, head_dim). Strides in bytes.
struct Heads {
  char* data;
  int64_t strides[3];

  char* at(int64_t b, int64_t row, int64_t head) const {
    return data + b * strides[0] + row * strides[1] + head * strides[2];
  }
};

Heads heads_of(const char* name, const Tensor& tensor, const Tensor& like, int64_t rows) {
  STD_TORCH_CHECK(tensor.dim() == 4, name, " must have 4 dimensions, got ", tensor.dim());
  check_rows_like(name, tensor, like);
  STD_TORCH_CHECK(tensor.size(0) == rows && tensor.size(3) == like.size(3), name, " must have shape (", rows,
                  ", S, Hk, ", like.size(3), ")");
  return {static_cast<char*>(tensor.mutable_data_ptr()),
          {stride_of(tensor, 0), stride_of(tensor, 1), stride_of(tensor, 2)}};
}

// cos and sin: (batch or 1, nodes, dim). Strides in bytes.
struct Angles {
  const char* cos = nullptr;
  const char* sin = nullptr;
  int64_t strides[2] = {0, 0};
  int64_t dim = 0;

  Rotation at(int64_t b, int64_t node) const {
    const int64_t offset = b * strides[0] + node * strides[1];
    return {cos + offset, sin + offset, dim};
  }
};

Angles angles_of(const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& qkv) {
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

void rotary_cache_write_cpu(Tensor qkv, std::optional<Tensor> cos, std::optional<Tensor> sin, Tensor k_cache,
                            Tensor v_cache, Tensor prefix_len, int64_t first_node, std::optional<Tensor> slots,
                            std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, double eps) {
  const Element element = floating_element_of("qkv", qkv);
  const int64_t batch = qkv.size(0), num_slots = slots ? k_cache.size(0) : batch;
  const Heads all = heads_of("qkv", qkv, qkv, batch), keys = heads_of("k_cache", k_cache, qkv, num_slots);
  const Heads values = heads_of("v_cache", v_cache, qkv, num_slots);
  const int64_t num_nodes = qkv.size(1), head_dim = qkv.size(3);
  const int64_t num_kv_heads = k_cache.size(2), num_q_heads = qkv.size(2) - 2 * num_kv_heads;
  const int64_t capacity = k_cache.size(1);
  STD_TORCH_CHECK(num_q_heads >= 1 && v_cache.size(1) == capacity && v_cache.size(2) == num_kv_heads,
                  "k_cache and v_cache must be alike, and qkv must have more heads than both");
  check_int32("prefix_len", prefix_len, 1, batch);
  if (slots) check_int32("slots", *slots, 1, batch);
  const int32_t* const slot_ids = slots ? static_cast<const int32_t*>(slots->const_data_ptr()) : nullptr;
  const int64_t slot_stride = slots ? slots->stride(0) : 0;
  const Norm q_rms = norm_of("q_norm", q_norm, eps, head_dim, qkv),
             k_rms = norm_of("k_norm", k_norm, eps, head_dim, qkv);
  const Angles angles = angles_of(cos, sin, qkv);
  const int32_t* const lengths = static_cast<const int32_t*>(prefix_len.const_data_ptr());
  const int64_t length_stride = prefix_len.stride(0), head_bytes = head_dim * bytes_of(element);
  const Kernel& kernel = find_kernel(element);
  const int64_t grain = kNumbersPerThread / (qkv.size(2) * head_dim + 1) + 1;
  torch::stable::parallel_for(0, batch * num_nodes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / num_nodes, node = i % num_nodes;
      const int64_t row = static_cast<int64_t>(lengths[b * length_stride]) + first_node + node;
      STD_TORCH_CHECK(row >= 0 && row < capacity, "prefix_len + first_node + T must be within the cache");
      const int64_t slot = slot_ids ? slot_ids[b * slot_stride] : b;
      STD_TORCH_CHECK(slot >= 0 && slot < num_slots, "slots must be rows of the cache");
      const Rotation rotation = angles.at(b, node);
      for (int64_t head = 0; head < num_q_heads; ++head) {
        char* const q = all.at(b, node, head);
        kernel.rotate(q, q_rms, rotation, head_dim, q);
      }
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        kernel.rotate(all.at(b, node, num_q_heads + head), k_rms, rotation, head_dim, keys.at(slot, row, head));
        std::memcpy(values.at(slot, row, head), all.at(b, node, num_q_heads + num_kv_heads + head), head_bytes);
      }
    }
  });
}

}  // namespace
}  // namespace decoder
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  SPECDEC_IMPL(m, "rms_norm", specdec::decoder::rms_norm_cpu);
  SPECDEC_IMPL(m, "rotary_cache_write_", specdec::decoder::rotary_cache_write_cpu);
}
