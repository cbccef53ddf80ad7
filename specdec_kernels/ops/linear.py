"""Linear layers whose rows do not depend on each other: schemas, contracts, checks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._ops import ops
from .._registry import define_op
from .._validate import check_dtype, check_kind, check_last_stride, check_no_grad, check_tensor
from ..reference.linear import gated_linear_ref, linear_ref

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _fake_linear(x, weights, biases, residual):
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def _fake_gated(x, gate_weight, up_weight, gate_bias, up_bias):
    return x.new_empty(*x.shape[:-1], gate_weight.shape[0])


define_op(
    "linear(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? residual) -> Tensor",
    reference=linear_ref,
    fake=_fake_linear,
    triton="kernels.linear:linear_triton",
    native=("cpu",),
)
define_op(
    "gated_linear(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias) -> Tensor",
    reference=gated_linear_ref,
    fake=_fake_gated,
    triton="kernels.linear:gated_linear_triton",
    native=("cpu",),
)


def linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), *, residual: Tensor | None = None
) -> Tensor:
    """Multiply the rows of one input with several matrices, side by side, and add a residual.

    ``out = residual + [x W₀ᵀ + b₀ | x W₁ᵀ + b₁ | …]``: a decoder layer's Q, K and V, or its output projection and what
    that is added to, in one call.

    On the CPU every matrix is read once, as it lies, and the bits of an output depend on its row of x and its row of
    the weights only: not on the number of rows (a single one included), on threads, or on the other matrices. On a GPU
    a row's bits do not depend on the contents of other rows, nor, up to 64 rows of 16 bits, on their number.

    Args:
        x: ``(..., C)`` fp16, bf16, fp32 or fp64, ``C ≥ 1``.
        weights: at least one, ``(N, C)`` each, as ``nn.Linear`` stores it.
        biases: one ``(N,)`` for each matrix, or none at all.
        residual: ``(..., ΣN)``.

    All in x's dtype, any strides but 1 in the last dimension. Products are summed in fp32 or better and rounded to the
    dtype after the bias; the sum with the residual is rounded again.

    Returns:
        ``(..., ΣN)``, contiguous.

    Raises:
        TypeError: a dtype is not supported or differs from x's, or no tensor where one belongs.
        ValueError: shapes, devices, strides or numbers of tensors disagree.
        RuntimeError: an input requires grad while grad is on.

    Example:
        >>> import torch
        >>> from specdec_kernels import linear
        >>> x, w_q, w_k = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(4, 8)
        >>> linear(x, [w_q, w_k]).shape
        torch.Size([2, 3, 20])
    """
    op = "linear"
    width = _check_input(op, x)
    if not len(weights):
        raise ValueError(f"{op}: weights must not be empty")
    for weight in weights:
        _check_like(op, "weights", weight, ("N", width), x)
    if len(biases) not in (0, len(weights)):
        raise ValueError(f"{op}: biases must be as many as weights, {len(weights)}, or none, got {len(biases)}")
    for bias, weight in zip(biases, weights, strict=False):
        _check_like(op, "biases", bias, (weight.shape[0],), x)
    if residual is not None:
        _check_like(op, "residual", residual, (*x.shape[:-1], sum(weight.shape[0] for weight in weights)), x)
    return ops.linear.default(x, weights, biases, residual)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """Return ``SiLU(x W_gateᵀ) · (x W_upᵀ)``, the first half of a gated MLP (SwiGLU), without storing either product.

    Args:
        x: ``(..., C)`` fp16, bf16, fp32 or fp64, ``C ≥ 1``.
        gate_weight, up_weight: ``(N, C)``.
        gate_bias, up_bias: ``(N,)``, both or none.

    All in x's dtype, any strides but 1 in the last dimension. Products, the activation and the result are rounded to
    the dtype, as separate modules would. Rows depend on each other as little as in `linear`.

    Returns:
        ``(..., N)``, contiguous.

    Raises:
        TypeError, ValueError, RuntimeError: as `linear`; ValueError for one bias without the other.

    Example:
        >>> import torch
        >>> from specdec_kernels import gated_linear
        >>> gated_linear(torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16, 8)).shape
        torch.Size([2, 3, 16])

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv 2002.05202), §2, SwiGLU.
    """
    op = "gated_linear"
    width = _check_input(op, x)
    _check_like(op, "gate_weight", gate_weight, ("N", width), x)
    _check_like(op, "up_weight", up_weight, (gate_weight.shape[0], width), x)
    if (gate_bias is None) != (up_bias is None):
        raise ValueError(f"{op}: gate_bias and up_bias must both be given, or none")
    if gate_bias is not None and up_bias is not None:
        _check_like(op, "gate_bias", gate_bias, (gate_weight.shape[0],), x)
        _check_like(op, "up_bias", up_bias, (gate_weight.shape[0],), x)
    return ops.gated_linear.default(x, gate_weight, up_weight, gate_bias, up_bias)


def _check_input(op: str, x: Tensor) -> int:
    """Check x and return its width."""
    check_tensor(op, "x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{op}: x must have a last dimension of at least 1, got shape {tuple(x.shape)}")
    check_dtype(op, "x", x, _FLOATS)
    check_last_stride(op, "x", x)
    check_no_grad(op, x=x)
    return x.shape[-1]


def _check_like(op: str, name: str, tensor: Tensor, shape: tuple[int | str, ...], x: Tensor) -> None:
    check_kind(op, name, tensor, shape, (x.dtype,), x.device)
    check_last_stride(op, name, tensor)
    check_no_grad(op, **{name: tensor})
