#include "cpu/medusa_project.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "common/check.h"
#include "common/empty.h"
#include "common/register.h"
#include "cpu/decoder_args.h"
#include "cpu/element_of.h"
#include "cpu/isa.h"
#include "cpu/machine.h"
#include "cpu/medusa_project_kernel.h"
#include "cpu/medusa_project_stages.h"
#include "cpu/rows.h"

namespace specdec {
namespace medusa {

const Kernel* find_kernel_plain(Element element) {
  return element == Element::kDouble ? kernel_for<SingleArithmetic<ArrayVec<double, 4>>, double>() : kernel_of(element);
}

const Kernel* find_kernel(Element element) {
  const Kernel* kernel = nullptr;
#if defined(__x86_64__)
  const IsaLevel level = isa_level();
  if (level >= IsaLevel::kAvx512Bf16) kernel = find_kernel_avx512_bf16(element);
  if (!kernel && level >= IsaLevel::kAvx512) kernel = find_kernel_avx512(element);
  if (!kernel && level >= IsaLevel::kAvx2) kernel = find_kernel_avx2(element);
#endif
  return kernel ? kernel : find_kernel_plain(element);
}

namespace {

void check_like(const char* name, const Tensor& tensor, int64_t dims, const Tensor& hidden) {
  STD_TORCH_CHECK(tensor.scalar_type() == hidden.scalar_type(), name, " must have hidden's dtype");
  check_same_device(name, tensor, hidden);
  STD_TORCH_CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions, got ", tensor.dim());
  STD_TORCH_CHECK(tensor.size(dims - 1) == hidden.size(1), name, " must be as wide as hidden");
  STD_TORCH_CHECK(tensor.size(dims - 1) == 1 || tensor.numel() == 0 || tensor.stride(dims - 1) == 1, name,
                  " must be contiguous in its last dimension");
}

// Of the pending token, with the block that sees it; all or, but for the bias, none.
struct RootTensors {
  const std::optional<Tensor>&embedding, &weight, &bias;
};

Root read_root(const Tensor& hidden, const RootTensors& from) {
  STD_TORCH_CHECK(from.embedding.has_value() == from.weight.has_value() && (from.weight || !from.bias),
                  "root and w_root must be given together");
  if (!from.embedding) return {};
  const int64_t item = static_cast<int64_t>(hidden.element_size()), width = hidden.size(1);
  check_rows_like("root", *from.embedding, hidden);
  check_rows_like("w_root", *from.weight, hidden);
  STD_TORCH_CHECK(
      from.embedding->dim() == 2 && from.embedding->size(0) == hidden.size(0) && from.embedding->size(1) == width,
      "root must have the shape of hidden");
  STD_TORCH_CHECK(from.weight->dim() == 2 && from.weight->size(0) == width && from.weight->size(1) == 2 * width,
                  "w_root must have shape (C, 2 C)");
  Root root{static_cast<const char*>(from.embedding->const_data_ptr()),
            from.embedding->stride(0) * item,
            static_cast<const char*>(from.weight->const_data_ptr()),
            from.weight->stride(0) * item,
            nullptr,
            &decoder::find_kernel(floating_element_of("hidden", hidden))};
  if (from.bias) {
    check_rows_like("b_root", *from.bias, hidden);
    STD_TORCH_CHECK(from.bias->dim() == 1 && from.bias->size(0) == width, "b_root must have shape (C,)");
    root.bias = static_cast<const char*>(from.bias->const_data_ptr());
  }
  return root;
}

Call read_call(const Tensor& hidden, const Tensor& w_res, const std::optional<Tensor>& b_res, const Tensor& w_out,
               bool include_base, const RootTensors& root) {
  STD_TORCH_CHECK(hidden.dim() == 2, "hidden must have 2 dimensions, got ", hidden.dim());
  check_like("hidden", hidden, 2, hidden);
  check_like("w_res", w_res, 4, hidden);
  Call call{};
  call.element = floating_element_of("hidden", hidden);
  const int64_t item = bytes_of(call.element);
  call.batch = hidden.size(0), call.width = hidden.size(1);
  call.num_heads = w_res.size(0), call.num_layers = w_res.size(1);
  call.own_projection = w_out.dim() == 3;
  call.include_base = include_base;
  check_like("w_out", w_out, call.own_projection ? 3 : 2, hidden);
  const int64_t rows = call.own_projection ? 1 : 0;
  call.vocab = w_out.size(rows);
  STD_TORCH_CHECK(w_res.size(2) == call.width, "w_res must be square");
  STD_TORCH_CHECK(call.num_heads >= 1 && call.width >= 1 && call.vocab >= 1, "w_res and w_out must not be empty");
  STD_TORCH_CHECK(call.vocab <= UINT32_MAX, "w_out must have fewer than 2^32 rows");
  STD_TORCH_CHECK(!call.own_projection || (w_out.size(0) == call.num_heads && !include_base),
                  "w_out must have a projection for each head");
  call.hidden = static_cast<const char*>(hidden.const_data_ptr()), call.hidden_stride = hidden.stride(0) * item;
  call.w_res = static_cast<const char*>(w_res.const_data_ptr());
  for (int i = 0; i < 3; ++i) call.w_res_strides[i] = w_res.stride(i) * item;
  call.w_out = static_cast<const char*>(w_out.const_data_ptr());
  call.w_out_strides[0] = call.own_projection ? w_out.stride(0) * item : 0;
  call.w_out_strides[1] = w_out.stride(rows) * item;
  if (b_res) {
    check_like("b_res", *b_res, 3, hidden);
    STD_TORCH_CHECK(b_res->size(0) == call.num_heads && b_res->size(1) == call.num_layers,
                    "b_res must have a row for each layer");
    call.b_res = static_cast<const char*>(b_res->const_data_ptr());
    for (int i = 0; i < 2; ++i) call.b_res_strides[i] = b_res->stride(i) * item;
  }
  call.root = read_root(hidden, root);
  return call;
}

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

Tensor medusa_project_cpu(Tensor hidden, Tensor w_res, std::optional<Tensor> b_res, Tensor w_out, bool include_base,
                          std::optional<Tensor> root, std::optional<Tensor> w_root, std::optional<Tensor> b_root) {
  const Call call = read_call(hidden, w_res, b_res, w_out, include_base, {root, w_root, b_root});
  Tensor logits = empty_cpu({call.batch, call.num_outputs(), call.vocab}, dtype_of(hidden));
  if (call.batch > 0) project(this_machine(call.element), call, static_cast<char*>(logits.mutable_data_ptr()));
  return logits;
}

std::tuple<Tensor, Tensor, Tensor> medusa_project_topk_cpu(Tensor hidden, Tensor w_res, std::optional<Tensor> b_res,
                                                           Tensor w_out, int64_t k, std::optional<Tensor> vocab_map,
                                                           bool include_base, std::optional<Tensor> root,
                                                           std::optional<Tensor> w_root, std::optional<Tensor> b_root) {
  const Call call = read_call(hidden, w_res, b_res, w_out, include_base, {root, w_root, b_root});
  STD_TORCH_CHECK(k >= 1 && k <= call.vocab, "k must be between 1 and the number of rows of w_out, got ", k);
  Tensor values = empty_cpu({call.batch, call.num_outputs(), k}, aoti_torch_dtype_float32());
  Tensor ids = empty_cpu({call.batch, call.num_outputs(), k}, aoti_torch_dtype_int64());
  Tensor lse = empty_cpu({call.batch, call.num_outputs()}, aoti_torch_dtype_float32());
  Ranking ranking{k,
                  nullptr,
                  0,
                  static_cast<float*>(values.mutable_data_ptr()),
                  static_cast<int64_t*>(ids.mutable_data_ptr()),
                  static_cast<float*>(lse.mutable_data_ptr())};
  if (vocab_map) {
    check_same_device("vocab_map", *vocab_map, hidden);
    STD_TORCH_CHECK(vocab_map->scalar_type() == torch::headeronly::ScalarType::Long && vocab_map->dim() == 1 &&
                        vocab_map->size(0) == call.vocab,
                    "vocab_map must have an int64 for each row of w_out");
    ranking.vocab_map = static_cast<const int64_t*>(vocab_map->const_data_ptr());
    ranking.map_stride = vocab_map->stride(0);
  }
  if (call.batch > 0) project_topk(this_machine(call.element), call, ranking);
  return {values, ids, lse};
}

}  // namespace
}  // namespace medusa
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  SPECDEC_IMPL(m, "medusa_project", specdec::medusa::medusa_project_cpu);
  SPECDEC_IMPL(m, "medusa_project_topk", specdec::medusa::medusa_project_topk_cpu);
}
