#include "cpu/decoder.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/register.h"
#include "cpu/decoder_args.h"
#include "cpu/decoder_kernel.h"
#include "cpu/element_of.h"
#include "cpu/isa.h"
#include "cpu/rows.h"

namespace specdec {
namespace decoder {

const Kernel* find_kernel_plain(Element element) {
  return element == Element::kDouble ? Row<ArrayVec<double, 4>, double>::kernel() : kernel_of(element);
}

const Kernel& find_kernel(Element element) {
  const Kernel* kernel = nullptr;
#if defined(__x86_64__)
  const IsaLevel level = isa_level();
  if (level >= IsaLevel::kAvx512) kernel = find_kernel_avx512(element);
  if (!kernel && level >= IsaLevel::kAvx2) kernel = find_kernel_avx2(element);
#endif
  return *(kernel ? kernel : find_kernel_plain(element));
}

namespace {

// Numbers that a thread should have at least: waking it costs about as much as they do.
constexpr int64_t kNumbersPerThread = 64 << 10;

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

void rotary_cache_write_cpu(Tensor qkv, std::optional<Tensor> cos, std::optional<Tensor> sin, Tensor k_cache,
                            Tensor v_cache, Tensor prefix_len, int64_t first_node, std::optional<Tensor> slots,
                            std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, double eps) {
  const Element element = floating_element_of("qkv", qkv);
  const int64_t batch = qkv.size(0), head_dim = qkv.size(3);
  Write write = places_of(qkv, prefix_len, slots, k_cache.size(0), k_cache.size(1), k_cache.size(2));
  write.qkv = heads_of("qkv", qkv, qkv, batch);
  write.keys = heads_of("k_cache", k_cache, qkv, write.num_slots);
  write.values = heads_of("v_cache", v_cache, qkv, write.num_slots);
  STD_TORCH_CHECK(write.num_q_heads >= 1 && v_cache.size(1) == k_cache.size(1) && v_cache.size(2) == k_cache.size(2),
                  "k_cache and v_cache must be alike, and qkv must have more heads than both");
  write.first_node = first_node;
  write.q_norm = norm_of("q_norm", q_norm, eps, head_dim, qkv);
  write.k_norm = norm_of("k_norm", k_norm, eps, head_dim, qkv);
  write.angles = angles_of(cos, sin, qkv);
  const Kernel& kernel = find_kernel(element);
  const int64_t grain = kNumbersPerThread / (qkv.size(2) * head_dim + 1) + 1;
  torch::stable::parallel_for(0, batch * write.num_nodes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      STD_TORCH_CHECK(write.fits(i), "prefix_len + first_node + T must be within the cache, slots be rows of it");
      write.node(kernel, i);
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
