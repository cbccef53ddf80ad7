#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "common/empty.h"
#include "common/register.h"
#include "cpu/isa.h"
#include "cpu/tree_attention_args.h"
#include "cpu/tree_attention_kernel.h"
#include "cpu/tree_attention_schedule.h"

namespace specdec {
namespace attention {

const Kernel* find_kernel_plain(Element q, Element) {
  return q == Element::kDouble ? kernel_of<FmaArithmetic<ArrayVec<double, 4>>>() : kernel_of<FmaArithmetic<FloatVec>>();
}

const Kernel& find_kernel(Element q, Element cache) {
  const Kernel* kernel = nullptr;
#if defined(__x86_64__)
  const IsaLevel level = isa_level();
  if (level >= IsaLevel::kAvx512Bf16) kernel = find_kernel_avx512_bf16(q, cache);
  if (!kernel && level >= IsaLevel::kAvx512) kernel = find_kernel_avx512(q, cache);
  if (!kernel && level >= IsaLevel::kAvx2) kernel = find_kernel_avx2(q, cache);
#endif
  return *(kernel ? kernel : find_kernel_plain(q, cache));
}

namespace {

void run(const Call& call, int64_t out_bytes) {
  const Problem& p = call.problem;
  std::vector<std::unique_ptr<Planner>> plans(call.batch);
  constexpr int64_t kPlansPerThread = 16;
  torch::stable::parallel_for(0, call.batch, kPlansPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) plans[b] = std::make_unique<Planner>(call.mask_of(b), call.prefix(b));
  });
  double multiplications = 0;
  for (int64_t b = 0; b < call.batch; ++b) {
    multiplications +=
        static_cast<double>(call.prefix(b) + p.num_nodes) * p.num_nodes * p.num_q_heads * (p.qk_dim + p.v_dim);
  }
  write_padding(call, plans, out_bytes);
  // Waking the other threads costs about as much as this.
  constexpr double kPerThread = 1 << 20;
  const int64_t threads = std::max<int64_t>(
      1, std::min<int64_t>(torch::stable::get_num_threads(), static_cast<int64_t>(multiplications / kPerThread)));
  Schedule schedule(p, find_kernel(p.q_element, p.cache_element), plans, threads);
  torch::stable::parallel_for(0, std::min(threads, schedule.num_tasks()), 1, [&](int64_t begin, int64_t) {
    thread_local Workspace workspace;
    schedule.work(&workspace);
  });
}

std::tuple<Tensor, Tensor> attend(Call* call, const Tensor& q) {
  const Problem& p = call->problem;
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &dtype));
  const bool is_double = p.q_element == Element::kDouble;
  Tensor out = empty_cpu({call->batch, p.num_nodes, p.num_q_heads, p.v_dim}, dtype);
  Tensor lse = empty_cpu({call->batch, p.num_nodes, p.num_q_heads},
                         is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32());
  if (call->batch > 0 && p.num_q_heads > 0) {
    call->problem.out = static_cast<char*>(out.mutable_data_ptr());
    call->problem.lse = lse.mutable_data_ptr();
    run(*call, static_cast<int64_t>(q.element_size()));
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor> tree_attention_cpu(Tensor q, Tensor k_cache, Tensor v_cache, Tensor tree_mask,
                                              Tensor prefix_len, std::optional<double> scale,
                                              std::optional<double> softcap, std::optional<int64_t> window,
                                              std::optional<Tensor> sinks, std::optional<Tensor> k_scale,
                                              std::optional<Tensor> v_scale) {
  Call call;
  read_sizes(q, k_cache, v_cache, &call);
  STD_TORCH_CHECK(k_cache.size(0) == call.batch, "k_cache must have as many batch rows as q");
  read_structure(q, tree_mask, prefix_len, &call);
  read_options(q, {scale, softcap, window, sinks, k_scale, v_scale}, &call);
  check_prefixes(call, k_cache.size(1));
  return attend(&call, q);
}

std::tuple<Tensor, Tensor> paged_tree_attention_cpu(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table,
                                                    Tensor tree_mask, Tensor prefix_len, std::optional<double> scale,
                                                    std::optional<double> softcap, std::optional<int64_t> window,
                                                    std::optional<Tensor> sinks, std::optional<Tensor> k_scale,
                                                    std::optional<Tensor> v_scale) {
  Call call;
  read_sizes(q, k_cache, v_cache, &call);
  read_structure(q, tree_mask, prefix_len, &call);
  read_options(q, {scale, softcap, window, sinks, k_scale, v_scale}, &call);
  check_int32("block_table", block_table, 2, call.batch);
  check_same_device("block_table", block_table, q);
  Problem& p = call.problem;
  p.page_size = k_cache.size(1);
  STD_TORCH_CHECK(p.page_size >= 1, "k_cache must have pages of at least one row");
  p.block_table = static_cast<const int32_t*>(block_table.const_data_ptr());
  p.table_strides[0] = block_table.stride(0);
  p.table_strides[1] = block_table.stride(1);
  check_prefixes(call, block_table.size(1) * p.page_size);
  check_pages(call, k_cache.size(0));
  return attend(&call, q);
}

}  // namespace
}  // namespace attention
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  SPECDEC_IMPL(m, "tree_attention", specdec::attention::tree_attention_cpu);
  SPECDEC_IMPL(m, "paged_tree_attention", specdec::attention::paged_tree_attention_cpu);
}
