"""Whole decoder layers in one call: schema, contract, checks."""

from collections.abc import Sequence

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
    check_values,
    values_readable,
)
from ..reference.layers import decoder_layers_ref

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The weights of a layer, in order, and those of them that may have a bias.
_WEIGHTS = ("norm", "q", "k", "v", "o", "mlp norm", "gate", "up", "down", "q norm", "k norm")
_BIASED = ("q", "k", "v", "o", "gate", "up", "down")


def _fake_layers(*_, **__):
    return None


define_op(
    "decoder_layers_(Tensor(a!) hidden, Tensor[] weights, Tensor? cos, Tensor? sin, Tensor(b!)[] caches, "
    "Tensor tree_mask, Tensor prefix_len, *, Tensor[] biases, int[] biased, Tensor? slots, int[] windows, "
    "int[] rotated, float scale, float eps) -> ()",
    reference=decoder_layers_ref,
    fake=_fake_layers,
    triton="kernels.layers:decoder_layers_triton",
    native=("cpu",),
)


def decoder_layers_(
    hidden: Tensor,
    weights: Sequence[Tensor],
    cos: Tensor | None,
    sin: Tensor | None,
    caches: Sequence[Tensor],
    tree_mask: Tensor,
    prefix_len: Tensor,
    *,
    biases: Sequence[Tensor] = (),
    biased: Sequence[int] = (),
    slots: Tensor | None = None,
    windows: Sequence[int] | None = None,
    rotated: Sequence[bool] | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
) -> None:
    """Run the hidden states of a step through decoder layers of Llama's kind, in place, and write their K and V.

    Each layer is what these ops make of it, one after the other, to the bit::

        h  →  rms_norm → linear(Wq Wk Wv) → rotary_cache_write_ → tree_attention → linear(Wo) + h  →  h
        h  →  rms_norm → gated_linear(Wgate Wup) → linear(Wdown) + h  →  h

    On the CPU the threads are woken once for all layers, and nothing between the stages is dispatched: that is a fifth
    of a step of one node of a small model. On a GPU the launches of these ops are prepared once for all layers.

    Args:
        hidden: ``(B, T, C)`` fp16, bf16, fp32 or fp64, contiguous; what comes, and then what the last layer gave.
        weights: one flat list, of each layer nine: norm ``(C,)``, Wq ``(Hq·D, C)``, Wk, Wv ``(Hk·D, C)``, Wo
            ``(C, Hq·D)``, the norm of the MLP ``(C,)``, Wgate, Wup ``(I, C)``, Wdown ``(C, I)``; or eleven, with norms
            ``(D,)`` of q's and k's heads behind these.
        cos, sin: as `rotary_cache_write_` takes them; None when no layer has positions.
        caches: one flat list, K and V of each layer, ``(B, S, Hk, D)``; with slots they may have any number of rows.
        tree_mask, prefix_len: as `tree_attention` takes them.
        biases: of each layer those of the matrices in ``biased``, ``(N,)``.
        biased: which of q, k, v, o, gate, up, down (0 … 6) have a bias, in that order, the same in every layer. Gate
            and up go together.
        slots: ``(B,) int32``, the row of the caches that each row owns, all different (not checked); None for its own.
        windows: of each layer, 0 for none; None for no windows.
        rotated: of each layer, whether it has positions; None for all, where cos is given.
        scale: of the scores, ``D ** -0.5`` when None.
        eps: of all norms.

    All in hidden's dtype, any strides but 1 in the last dimension; all layers have the same sizes. Not checked on a
    GPU, because it would wait for the device: the values of ``prefix_len`` and ``slots``. Not checked anywhere: as in
    these ops, and that hidden and the caches lie in memory of their own. On a GPU, heads of more than 256 dims run on
    the reference, which has other bits than the ops.

    Raises:
        TypeError, ValueError, RuntimeError: as these ops; ValueError for lists that do not belong together.

    Example:
        >>> import torch
        >>> from specdec_kernels import decoder_layers_
        >>> shapes = [(8,), (8, 8), (4, 8), (4, 8), (8, 8), (8,), (16, 8), (16, 8), (8, 16)]
        >>> weights = [torch.randn(shape) for shape in shapes]
        >>> hidden, caches = torch.randn(1, 1, 8), [torch.zeros(1, 5, 1, 4) for _ in range(2)]
        >>> mask, prefix_len = torch.ones(1, 1, 1, dtype=torch.int64), torch.tensor([3], dtype=torch.int32)
        >>> decoder_layers_(hidden, weights, None, None, caches, mask, prefix_len)
        >>> [int(cache.count_nonzero()) for cache in caches]
        [4, 4]
    """
    op = "decoder_layers_"
    count = _check_lists(op, weights, biases, biased, caches, windows, rotated)
    _check_hidden(op, hidden, caches[0])
    sizes = _sizes_of(op, hidden, weights, caches[0])
    per_layer = len(weights) // count
    for i, weight in enumerate(weights):
        _check_like(op, f"weights[{i}]", weight, sizes[_WEIGHTS[i % per_layer]], hidden)
    for i, bias in enumerate(biases):
        _check_like(op, f"biases[{i}]", bias, sizes[_BIASED[biased[i % len(biased)]]][:1], hidden)
    for i, cache in enumerate(caches):
        _check_like(op, f"caches[{i}]", cache, caches[0].shape, hidden)
    _check_tree(op, hidden, caches[0], tree_mask, prefix_len, slots)
    _check_angles(op, cos, sin, hidden, caches[0].shape[3])
    for name, number in (("scale", scale), ("eps", eps)):
        if number is not None:
            check_number(op, name, number)
    check_no_grad(op, hidden=hidden, **{f"weights[{i}]": w for i, w in enumerate(weights)})
    ops.decoder_layers_.default(
        *(hidden, weights, cos, sin, caches, tree_mask, prefix_len),
        biases=biases,
        biased=biased,
        slots=slots,
        windows=[0] * count if windows is None else windows,
        rotated=[int(cos is not None)] * count if rotated is None else [int(r) for r in rotated],
        scale=caches[0].shape[3] ** -0.5 if scale is None else float(scale),
        eps=float(eps),
    )


def _check_lists(op: str, weights, biases, biased, caches, windows, rotated) -> int:
    """Return the number of layers."""
    count = len(caches) // 2
    if count < 1 or len(caches) % 2:
        raise ValueError(f"{op}: caches must be two for each layer, got {len(caches)}")
    if len(weights) not in (9 * count, 11 * count):
        raise ValueError(f"{op}: weights must be 9 or 11 for each of {count} layers, got {len(weights)}")
    if list(biased) != sorted(set(biased)) or not set(biased) <= set(range(7)) or (4 in biased) != (5 in biased):
        raise ValueError(f"{op}: biased must be increasing in [0, 6], 4 and 5 both or none, got {list(biased)}")
    if len(biases) != count * len(biased):
        raise ValueError(f"{op}: biases must be {count * len(biased)}, got {len(biases)}")
    for name, values in (("windows", windows), ("rotated", rotated)):
        if values is not None and (len(values) != count or any(value < 0 for value in values)):
            raise ValueError(f"{op}: {name} must be {count} numbers of at least 0, got {list(values)}")
    return count


def _check_hidden(op: str, hidden: Tensor, cache: Tensor) -> None:
    check_shape(op, "hidden", hidden, ("B", "T", "C"))
    check_dtype(op, "hidden", hidden, _FLOATS)
    if 0 in hidden.shape[1:]:
        raise ValueError(f"{op}: hidden must have shape (B, T, C) with T, C >= 1, got {tuple(hidden.shape)}")
    if not hidden.is_contiguous():
        raise ValueError(f"{op}: hidden must be contiguous, got strides {hidden.stride()}")
    check_shape(op, "caches[0]", cache, ("rows", "S", "Hk", "D"))
    if 0 in cache.shape[2:]:
        raise ValueError(f"{op}: caches[0] must have heads, got shape {tuple(cache.shape)}")


def _sizes_of(op: str, hidden: Tensor, weights: Sequence[Tensor], cache: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a layer, the free ones as the first layer has them."""
    width, (num_kv_heads, head_dim) = hidden.shape[2], cache.shape[2:]
    check_shape(op, "weights[1]", weights[1], ("Hq D", width))
    check_shape(op, "weights[6]", weights[6], ("I", width))
    queries, inner, kv = weights[1].shape[0], weights[6].shape[0], num_kv_heads * head_dim
    if queries < 1 or queries % kv or inner < 1:
        raise ValueError(
            f"{op}: weights[1] must have a multiple of {kv} rows, and weights[6] some, got {queries, inner}"
        )
    norm, head = (width,), (head_dim,)
    into, out_of = [(queries, width), (kv, width), (kv, width)], [(width, queries), (width, inner)]
    shapes = [norm, *into, out_of[0], norm, (inner, width), (inner, width), out_of[1], head, head]
    return dict(zip(_WEIGHTS, shapes, strict=True))


def _check_tree(op: str, hidden: Tensor, cache: Tensor, tree_mask: Tensor, prefix_len: Tensor, slots) -> None:
    batch, num_nodes = hidden.shape[:2]
    mask_batch = batch if isinstance(tree_mask, Tensor) and tree_mask.shape[:1] != (1,) else 1
    check_shape(op, "tree_mask", tree_mask, (mask_batch, num_nodes, (num_nodes + 63) // 64))
    check_dtype(op, "tree_mask", tree_mask, (torch.int64,))
    check_device(op, "tree_mask", tree_mask, hidden.device)
    for name, tensor in (("prefix_len", prefix_len), ("slots", slots)):
        if tensor is not None:
            check_shape(op, name, tensor, (batch,))
            check_dtype(op, name, tensor, (torch.int32,))
            check_device(op, name, tensor, hidden.device)
    if slots is None and cache.shape[0] != batch:
        raise ValueError(f"{op}: caches must have {batch} rows, got {cache.shape[0]}")
    if cache.shape[1] < num_nodes:
        raise ValueError(f"{op}: caches must have room for {num_nodes} nodes, got {cache.shape[1]}")
    if values_readable(prefix_len, slots):
        check_values(op, "prefix_len", prefix_len, 0, cache.shape[1] - num_nodes)
        if slots is not None:
            check_values(op, "slots", slots, 0, cache.shape[0] - 1)


def _check_angles(op: str, cos: Tensor | None, sin: Tensor | None, hidden: Tensor, head_dim: int) -> None:
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError(f"{op}: cos and sin must both be given, or none")
        return
    batch = 1 if isinstance(cos, Tensor) and cos.shape[:1] == (1,) else hidden.shape[0]
    _check_like(op, "cos", cos, (batch, hidden.shape[1], "Dr"), hidden)
    _check_like(op, "sin", sin, cos.shape, hidden)
    if cos.shape[2] % 2 or cos.shape[2] > head_dim:
        raise ValueError(f"{op}: cos must have an even width of at most {head_dim}, got {cos.shape[2]}")
    if cos.stride() != sin.stride():
        raise ValueError(f"{op}: sin must have the strides of cos, {cos.stride()}, got {sin.stride()}")


def _check_like(op: str, name: str, tensor: Tensor, shape, like: Tensor) -> None:
    check_shape(op, name, tensor, shape)
    check_dtype(op, name, tensor, (like.dtype,))
    check_device(op, name, tensor, like.device)
    check_last_stride(op, name, tensor)
