#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "common/kv_args.h"
#include "cuda/kv_compact.cuh"

namespace specdec {
namespace {

template <bool kPaged>
void launch_all(const std::vector<Cache>& caches, const Paths& paths, int32_t device_index) {
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  plan_launches(caches.data(), static_cast<int64_t>(caches.size()), paths, [&](const Launch& launch, Grid grid) {
    kv_compact_kernel<kPaged>
        <<<dim3(grid.x, grid.y, grid.z), grid.threads, 0, static_cast<cudaStream_t>(stream)>>>(launch);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void kv_compact_cuda(std::vector<Tensor> caches, Tensor accepted, Tensor num_accepted, Tensor prefix_len,
                     std::optional<Tensor> new_len) {
  const Paths paths = read_paths(accepted, num_accepted, prefix_len, nullptr, new_len);
  launch_all<false>(read_caches(caches, accepted, false), paths, accepted.get_device_index());
}

void paged_kv_compact_cuda(std::vector<Tensor> caches, Tensor block_table, Tensor accepted, Tensor num_accepted,
                           Tensor prefix_len, std::optional<Tensor> new_len) {
  const Paths paths = read_paths(accepted, num_accepted, prefix_len, &block_table, new_len);
  launch_all<true>(read_caches(caches, accepted, true), paths, accepted.get_device_index());
}

// The contract test checks the types of the CPU kernels against the schema, and these hold the CUDA kernels to the
// same.
static_assert(std::is_same_v<decltype(kv_compact_cuda), KvCompact>);
static_assert(std::is_same_v<decltype(paged_kv_compact_cuda), PagedKvCompact>);

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CUDA, m) {
  m.impl("kv_compact_", TORCH_BOX(&specdec::kv_compact_cuda));
  m.impl("paged_kv_compact_", TORCH_BOX(&specdec::paged_kv_compact_cuda));
}
