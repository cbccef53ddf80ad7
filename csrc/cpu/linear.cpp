#include "cpu/linear.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/check.h"
#include "common/register.h"
#include "cpu/element_of.h"
#include "cpu/machine.h"
#include "cpu/rows.h"

namespace specdec {
namespace linear {
namespace {

void add_matrix(const Tensor& x, const Tensor& weight, const Tensor* bias, Call* call) {
  check_rows_like("weights", weight, x);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == call->width, "weights must have shape (N, ", call->width, ")");
  Matrix matrix{static_cast<const char*>(weight.const_data_ptr()),
                weight.stride(0) * static_cast<int64_t>(weight.element_size()), weight.size(0), nullptr};
  if (bias) {
    check_rows_like("biases", *bias, x);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == matrix.count, "biases must have shape (N,)");
    matrix.bias = static_cast<const char*>(bias->const_data_ptr());
  }
  call->matrices.push_back(matrix);
}

Call read_call(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases) {
  Call call{};
  call.element = floating_element_of("x", x);
  check_rows_like("x", x, x);
  call.width = x.size(x.dim() - 1);
  STD_TORCH_CHECK(call.width >= 1 && !weights.empty(), "x and weights must not be empty");
  STD_TORCH_CHECK(biases.empty() || biases.size() == weights.size(), "biases must be as many as weights, or none");
  for (size_t i = 0; i < weights.size(); ++i) add_matrix(x, weights[i], biases.empty() ? nullptr : &biases[i], &call);
  call.rows = rows_of(x);
  return call;
}

void run(Call* call, Tensor* out, int64_t width) {
  if (call->rows.empty() || width == 0) return;
  call->out = static_cast<char*>(out->mutable_data_ptr());
  call->out_stride = width * bytes_of(call->element);
  const Machine machine = medusa::this_machine(call->element);
  const medusa::Bytes operands(machine.kernel->operand_bytes(call->num_rows(), call->width));
  Run(*machine.kernel, *call, operands.data()).run(machine);
}

Tensor linear_cpu(Tensor x, std::vector<Tensor> weights, std::vector<Tensor> biases, std::optional<Tensor> residual) {
  Call call = read_call(x, weights, biases);
  int64_t width = 0;
  for (const Matrix& matrix : call.matrices) width += matrix.count;
  if (residual) {
    check_rows_like("residual", *residual, x);
    call.residual = rows_of(*residual);
    STD_TORCH_CHECK(call.residual.size() == call.rows.size() && residual->size(residual->dim() - 1) == width,
                    "residual must have the shape of the result");
  }
  Tensor out = empty_like_rows(x, width);
  run(&call, &out, width);
  return out;
}

Tensor gated_linear_cpu(Tensor x, Tensor gate_weight, Tensor up_weight, std::optional<Tensor> gate_bias,
                        std::optional<Tensor> up_bias) {
  STD_TORCH_CHECK(gate_bias.has_value() == up_bias.has_value(), "both or none of the biases must be given");
  std::vector<Tensor> biases;
  if (gate_bias) biases = {*gate_bias, *up_bias};
  Call call = read_call(x, {gate_weight, up_weight}, biases);
  const int64_t width = call.matrices[0].count;
  STD_TORCH_CHECK(call.matrices[1].count == width, "gate_weight and up_weight must have as many rows");
  call.is_gated = true;
  Tensor out = empty_like_rows(x, width);
  run(&call, &out, width);
  return out;
}

}  // namespace
}  // namespace linear
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  SPECDEC_IMPL(m, "linear", specdec::linear::linear_cpu);
  SPECDEC_IMPL(m, "gated_linear", specdec::linear::gated_linear_cpu);
}
