#include "cpu/kv_compact.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "common/kv_args.h"
#include "common/register.h"

namespace specdec {
namespace {

constexpr auto kParallelFor = [](int64_t end, int64_t grain, const auto& body) {
  torch::stable::parallel_for(0, end, grain, body);
};

void kv_compact_cpu(std::vector<Tensor> caches, Tensor accepted, Tensor num_accepted, Tensor prefix_len,
                    std::optional<Tensor> new_len) {
  const Paths paths = read_paths(accepted, num_accepted, prefix_len, nullptr, new_len);
  const std::vector<Cache> rows = read_caches(caches, accepted, false);
  compact_caches<false>(rows.data(), static_cast<int64_t>(rows.size()), paths, kParallelFor);
}

void paged_kv_compact_cpu(std::vector<Tensor> caches, Tensor block_table, Tensor accepted, Tensor num_accepted,
                          Tensor prefix_len, std::optional<Tensor> new_len) {
  const Paths paths = read_paths(accepted, num_accepted, prefix_len, &block_table, new_len);
  const std::vector<Cache> rows = read_caches(caches, accepted, true);
  compact_caches<true>(rows.data(), static_cast<int64_t>(rows.size()), paths, kParallelFor);
}

static_assert(std::is_same_v<decltype(kv_compact_cpu), KvCompact>);
static_assert(std::is_same_v<decltype(paged_kv_compact_cpu), PagedKvCompact>);

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  SPECDEC_IMPL(m, "kv_compact_", specdec::kv_compact_cpu);
  SPECDEC_IMPL(m, "paged_kv_compact_", specdec::paged_kv_compact_cpu);
}
