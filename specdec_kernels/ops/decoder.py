"""What a decoder layer does between its linear layers: schemas, contracts, checks."""

import torch
from torch import Tensor

from .._ops import ops
from .._registry import define_op
from .._validate import (
    check_device,
    check_dtype,
    check_last_stride,
    check_no_grad,
    check_number,
    check_shape,
    check_tensor,
    check_values,
    values_readable,
)
from ..reference.decoder import rms_norm_ref, rotary_cache_write_ref

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _fake_norm(x, weight, eps):
    return x.new_empty(x.shape)


def _fake_write(*_, **__):
    return None


define_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm_ref,
    fake=_fake_norm,
    triton="kernels.decoder:rms_norm_triton",
    native=("cpu",),
)
define_op(
    "rotary_cache_write_(Tensor(a!) qkv, Tensor? cos, Tensor? sin, Tensor(b!) k_cache, Tensor(c!) v_cache, "
    "Tensor prefix_len, *, int first_node, Tensor? slots, Tensor? q_norm, Tensor? k_norm, float eps) -> ()",
    reference=rotary_cache_write_ref,
    fake=_fake_write,
    triton="kernels.decoder:rotary_cache_write_triton",
    native=("cpu",),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight · x / √(mean(x²) + eps)``, each row by itself.

    Args:
        x: ``(..., C)`` fp16, bf16, fp32 or fp64, ``C ≥ 1``.
        weight: ``(C,)`` in x's dtype.
        eps: is added to the mean.

    Any strides but 1 in the last dimension. The mean is at least fp32; the quotient is rounded to the dtype before it
    is multiplied with the weight, as Llama does it (Gemma multiplies first). The bits of a row do not depend on the
    other rows.

    Returns:
        ``(..., C)``, contiguous.

    Raises:
        TypeError: a dtype is not supported or differs from x's, or ``eps`` is no number.
        ValueError: shapes, devices or strides disagree.
        RuntimeError: an input requires grad while grad is on.

    Example:
        >>> import torch
        >>> from specdec_kernels import rms_norm
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
        tensor([[0.8485, 1.1314]])

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization (arXiv 1910.07467), equation 4.
    """
    op = "rms_norm"
    check_tensor(op, "x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{op}: x must have a last dimension of at least 1, got shape {tuple(x.shape)}")
    check_dtype(op, "x", x, _FLOATS)
    check_last_stride(op, "x", x)
    _check_like(op, "weight", weight, (x.shape[-1],), x)
    check_number(op, "eps", eps)
    check_no_grad(op, x=x, weight=weight)
    return ops.rms_norm.default(x, weight, eps)


def rotary_cache_write_(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_len: Tensor,
    *,
    first_node: int = 0,
    slots: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Make of a merged QKV projection what attention needs: rotate q in place, write K and V into the cache.

    For each node *i* of row *b*, with cache row ``r = prefix_len[b] + first_node + i``::

        qkv[b, i]     q q q q q q k k v v       q ← R(norm(q))                 in place
                                                k_cache[b, r] ← R(norm(k))     k itself stays
                                                v_cache[b, r] ← v

    ``R(x) = x · cos + [−x₂ | x₁] · sin`` over the first ``Dr`` numbers of a head, ``x₁`` and ``x₂`` their halves; the
    others are kept. ``qkv[:, :, :Hq]`` is then the ``q`` of `tree_attention`, which takes it with its strides.

    Args:
        qkv: ``(B, T, Hq + 2·Hk, D)`` fp16, bf16, fp32 or fp64, the heads of q, then k, then v; ``Hq ≥ 1``.
        cos, sin: ``(B or 1, T, Dr)``, ``Dr ≤ D`` even, with the same strides; None for a layer without positions.
        k_cache, v_cache: ``(B, S, Hk, D)``; with slots they may have any number of rows.
        prefix_len: ``(B,) int32``, ``0 ≤ prefix_len ≤ S − first_node − T``.
        first_node: nodes of the step that are in the cache already.
        slots: ``(B,) int32``, the row of the caches that each row writes to, all different (not checked); None for its
            own.
        q_norm, k_norm: ``(D,)``, weights of an RMS norm of every head (see `rms_norm`), or None.
        eps: of these norms.

    Floats in qkv's dtype, any strides but 1 in the last dimension. Every product and every sum is rounded to the dtype,
    as separate operations would. A node's bits depend on its own row only.

    Not checked on a GPU, because it would wait for the device: the values of ``prefix_len`` and ``slots``. Not checked
    anywhere: that qkv and the caches lie in memory of their own.

    Raises:
        TypeError: a dtype is not supported or differs from qkv's.
        ValueError: shapes, devices or strides disagree; a value is out of range.
        RuntimeError: an input requires grad while grad is on.

    Example:
        >>> import torch
        >>> from specdec_kernels import rotary_cache_write_
        >>> qkv, k_cache, v_cache = torch.randn(1, 2, 6, 8), torch.zeros(1, 16, 1, 8), torch.zeros(1, 16, 1, 8)
        >>> angle = torch.arange(3.0, 5.0)[:, None] * torch.ones(8)
        >>> rotary_cache_write_(qkv, angle.cos()[None], angle.sin()[None], k_cache, v_cache, torch.tensor([3]).int())
        >>> torch.equal(v_cache[0, 3:5], qkv[0, :, 5:])
        True

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), equation 34, in the halves layout of GPT-NeoX and Llama.
    """
    op = "rotary_cache_write_"
    check_shape(op, "qkv", qkv, ("B", "T", "Hq + 2 Hk", "D"))
    batch, num_nodes, num_heads, head_dim = qkv.shape
    check_dtype(op, "qkv", qkv, _FLOATS)
    check_last_stride(op, "qkv", qkv)
    _check_like(op, "k_cache", k_cache, (batch if slots is None else "rows", "S", "Hk", head_dim), qkv)
    _check_like(op, "v_cache", v_cache, k_cache.shape, qkv)
    capacity, num_kv_heads = k_cache.shape[1:3]
    if num_kv_heads < 1 or num_heads <= 2 * num_kv_heads:
        raise ValueError(f"{op}: qkv must have more than 2 · {num_kv_heads} heads, got {num_heads}")
    _check_angles(op, cos, sin, qkv)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            _check_like(op, name, norm, (head_dim,), qkv)
    _check_indices(op, prefix_len, slots, qkv)
    check_number(op, "first_node", first_node, whole=True)
    check_number(op, "eps", eps)
    if first_node < 0 or first_node + num_nodes > capacity:
        raise ValueError(f"{op}: first_node must be in [0, {capacity - num_nodes}], got {first_node}")
    if values_readable(prefix_len, slots):
        check_values(op, "prefix_len", prefix_len, 0, capacity - num_nodes - first_node)
        if slots is not None:
            check_values(op, "slots", slots, 0, k_cache.shape[0] - 1)
    check_no_grad(op, qkv=qkv, k_cache=k_cache, v_cache=v_cache, q_norm=q_norm, k_norm=k_norm)
    ops.rotary_cache_write_.default(
        *(qkv, cos, sin, k_cache, v_cache, prefix_len),
        first_node=first_node,
        slots=slots,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=float(eps),
    )


def _check_indices(op: str, prefix_len: Tensor, slots: Tensor | None, qkv: Tensor) -> None:
    for name, tensor in {"prefix_len": prefix_len, **({} if slots is None else {"slots": slots})}.items():
        check_shape(op, name, tensor, (qkv.shape[0],))
        check_dtype(op, name, tensor, (torch.int32,))
        check_device(op, name, tensor, qkv.device)


def _check_angles(op: str, cos: Tensor | None, sin: Tensor | None, qkv: Tensor) -> None:
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError(f"{op}: cos and sin must both be given, or none")
        return
    check_tensor(op, "cos", cos)
    batch = 1 if cos.shape[:1] == (1,) else qkv.shape[0]
    _check_like(op, "cos", cos, (batch, qkv.shape[1], "Dr"), qkv)
    _check_like(op, "sin", sin, cos.shape, qkv)
    if cos.shape[2] % 2 or cos.shape[2] > qkv.shape[3]:
        raise ValueError(f"{op}: cos must have an even width of at most {qkv.shape[3]}, got {cos.shape[2]}")
    if cos.stride() != sin.stride():
        raise ValueError(f"{op}: sin must have the strides of cos, {cos.stride()}, got {sin.stride()}")
    check_no_grad(op, cos=cos, sin=sin)


def _check_like(op: str, name: str, tensor: Tensor, shape, like: Tensor) -> None:
    check_shape(op, name, tensor, shape)
    check_dtype(op, name, tensor, (like.dtype,))
    check_device(op, name, tensor, like.device)
    check_last_stride(op, name, tensor)
