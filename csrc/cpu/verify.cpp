#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "common/empty.h"
#include "common/register.h"
#include "cpu/verify_args.h"
#include "cpu/verify_kernel.h"
#include "cpu/verify_philox.h"

namespace specdec {
namespace verification {

const RowKernel* row_kernel_plain(Element element) { return kernel_of(element); }

namespace {

using Results = std::tuple<Tensor, Tensor, Tensor>;

// Waking the other threads costs about as much as reading this many logits.
constexpr int64_t kPerThread = 1 << 13;

void on_all_threads(int64_t num_blocks, const void* body, void (*call)(const void*, int64_t, int64_t)) {
  torch::stable::parallel_for(0, num_blocks, 2, [&](int64_t begin, int64_t end) { call(body, begin, end); });
}

// Applies a rule to every batch row. Threads share the rows of a large batch, and the ids of each row of a small one.
Results run(Call* call, void (Walk::*rule)(int64_t)) {
  Problem& p = call->problem;
  Tensor output_ids = empty_cpu({p.batch, p.num_nodes}, aoti_torch_dtype_int64());
  Tensor num_accepted = empty_cpu({p.batch}, aoti_torch_dtype_int32());
  Tensor accepted = empty_cpu({p.batch, p.num_nodes - 1}, aoti_torch_dtype_int32());
  p.output_ids = static_cast<int64_t*>(output_ids.mutable_data_ptr());
  p.num_accepted = static_cast<int32_t*>(num_accepted.mutable_data_ptr());
  p.accepted = static_cast<int32_t*>(accepted.mutable_data_ptr());
  const int64_t num_threads = torch::stable::get_num_threads();
  const bool by_id = num_threads > 1 && p.vocab >= 2 * kPerThread && p.batch < 4 * num_threads;
  const bool by_row = num_threads > 1 && !by_id && p.batch > 1 && p.batch * p.vocab >= 2 * kPerThread;
  const auto rows = [&](int64_t begin, int64_t end) {
    Walk walk(p, by_id ? on_all_threads : nullptr);
    for (int64_t row = begin; row < end; ++row) (walk.*rule)(row);
  };
  if (by_row) {
    torch::stable::parallel_for(0, p.batch, 1, rows);
  } else if (p.batch > 0) {
    rows(0, p.batch);
  }
  return {output_ids, num_accepted, accepted};
}

Results verify_chain_cpu(Tensor draft_ids, Tensor target_logits, std::optional<Tensor> draft_logits, Tensor temperature,
                         Tensor uniforms, std::optional<Tensor> draft_len, bool block,
                         std::optional<Tensor> draft_vocab_map) {
  Call call;
  read_ids("draft_ids", draft_ids, target_logits, false, &call);
  read_draft(draft_logits, draft_vocab_map, draft_ids, false, &call);
  read_randomness(temperature, uniforms, draft_ids, &call);
  read_lengths("draft_len", draft_len, 1, draft_ids, &call);
  return run(&call, block ? &Walk::block : &Walk::tree);
}

Results verify_tree_cpu(Tensor ids, Tensor parents, Tensor target_logits, std::optional<Tensor> draft_logits,
                        Tensor temperature, Tensor uniforms, std::optional<Tensor> num_nodes, bool with_replacement,
                        std::optional<Tensor> draft_vocab_map) {
  Call call;
  read_ids("ids", ids, target_logits, true, &call);
  read_parents(parents, ids, &call);
  read_draft(draft_logits, draft_vocab_map, ids, true, &call);
  read_randomness(temperature, uniforms, ids, &call);
  read_lengths("num_nodes", num_nodes, 0, ids, &call);
  call.problem.with_replacement = with_replacement;
  return run(&call, &Walk::tree);
}

Results verify_tree_greedy_cpu(Tensor ids, Tensor parents, Tensor target_logits, std::optional<Tensor> num_nodes) {
  Call call;
  read_ids("ids", ids, target_logits, true, &call);
  read_parents(parents, ids, &call);
  read_lengths("num_nodes", num_nodes, 0, ids, &call);
  return run(&call, &Walk::tree);
}

Results verify_tree_typical_cpu(Tensor ids, Tensor parents, Tensor target_logits, Tensor temperature, Tensor uniforms,
                                std::optional<Tensor> num_nodes, double epsilon, double delta) {
  Call call;
  read_ids("ids", ids, target_logits, true, &call);
  read_parents(parents, ids, &call);
  read_randomness(temperature, uniforms, ids, &call);
  read_lengths("num_nodes", num_nodes, 0, ids, &call);
  call.problem.epsilon = epsilon;
  call.problem.delta = delta;
  return run(&call, &Walk::typical);
}

Tensor philox_uniforms_cpu(Tensor seed, Tensor position, int64_t count) {
  check_kind("seed", seed, ScalarType::Long, 1, seed);
  check_kind("position", position, ScalarType::Long, 1, seed);
  STD_TORCH_CHECK(position.size(0) == seed.size(0), "seed and position must have the same size");
  STD_TORCH_CHECK(count >= 0, "count must be at least 0, got ", count);
  const int64_t num_rows = seed.size(0), seed_stride = seed.stride(0), position_stride = position.stride(0);
  Tensor uniforms = empty_cpu({num_rows, count}, aoti_torch_dtype_float32());
  const auto* const seeds = static_cast<const int64_t*>(seed.const_data_ptr());
  const auto* const positions = static_cast<const int64_t*>(position.const_data_ptr());
  float* out = static_cast<float*>(uniforms.mutable_data_ptr());
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t draw = 0; draw < count; draw += 4) {
      const Philox philox(static_cast<uint64_t>(seeds[row * seed_stride]),
                          static_cast<uint64_t>(positions[row * position_stride]), static_cast<uint32_t>(draw / 4));
      for (int i = 0; i < 4 && draw + i < count; ++i) *out++ = philox.uniform(i);
    }
  }
  return uniforms;
}

}  // namespace
}  // namespace verification
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  SPECDEC_IMPL(m, "verify_chain", specdec::verification::verify_chain_cpu);
  SPECDEC_IMPL(m, "verify_tree", specdec::verification::verify_tree_cpu);
  SPECDEC_IMPL(m, "verify_tree_greedy", specdec::verification::verify_tree_greedy_cpu);
  SPECDEC_IMPL(m, "verify_tree_typical", specdec::verification::verify_tree_typical_cpu);
  SPECDEC_IMPL(m, "philox_uniforms", specdec::verification::philox_uniforms_cpu);
}
