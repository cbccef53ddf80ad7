"""Whole decoder layers in plain torch: the references of their ops, one after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .decoder import rms_norm_ref, rotary_cache_write_ref
from .linear import gated_linear_ref, linear_ref
from .tree_attention import paged_tree_attention_ref, tree_attention_ref


def decoder_layers_ref(
    hidden: Tensor,
    weights: Sequence[Tensor],
    cos: Tensor | None,
    sin: Tensor | None,
    caches: Sequence[Tensor],
    tree_mask: Tensor,
    prefix_len: Tensor,
    *,
    biases: Sequence[Tensor],
    biased: Sequence[int],
    slots: Tensor | None,
    windows: Sequence[int],
    rotated: Sequence[int],
    scale: float,
    eps: float,
) -> None:
    """Run the layers in place; see `specdec_kernels.decoder_layers_`."""
    count = len(weights) // len(windows)
    x = hidden
    for layer, (window, is_rotated) in enumerate(zip(windows, rotated, strict=True)):
        w = weights[layer * count : (layer + 1) * count]
        some = biases[layer * len(biased) : (layer + 1) * len(biased)]
        b: dict[int, Tensor] = dict(zip(biased, some, strict=True))
        qkv = _merged(rms_norm_ref(x, w[0], eps), w[1:4], [b.get(i) for i in range(3)])
        angles = (cos, sin) if is_rotated else (None, None)
        cache = caches[2 * layer], caches[2 * layer + 1]
        norms = (w[9], w[10]) if count == 11 else (None, None)
        attended = _attend(qkv, angles, cache, (tree_mask, prefix_len, slots), norms, window or None, scale, eps)
        x = _merged(attended, w[4:5], [b.get(3)], x)
        gated = gated_linear_ref(rms_norm_ref(x, w[5], eps), w[6], w[7], b.get(4), b.get(5))
        x = _merged(gated, w[8:9], [b.get(6)], x)
    hidden.copy_(x)


def _merged(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], residual: Tensor | None = None
) -> Tensor:
    parts = [linear_ref(x, [w], [] if b is None else [b], None) for w, b in zip(weights, biases, strict=True)]
    y = torch.cat(parts, dim=-1)
    return y if residual is None else residual + y


def _attend(qkv, angles, caches, tree, norms, window, scale, eps) -> Tensor:
    (k, v), (cos, sin), (tree_mask, prefix_len, slots) = caches, angles, tree
    qkv = qkv.unflatten(2, (-1, k.shape[3]))
    options = {"first_node": 0, "slots": slots, "q_norm": norms[0], "k_norm": norms[1], "eps": eps}
    rotary_cache_write_ref(qkv, cos, sin, k, v, prefix_len, **options)
    q = qkv[:, :, : -2 * k.shape[2]]
    rest = {"softcap": None, "window": window, "sinks": None, "k_scale": None, "v_scale": None}
    if slots is None:
        out, _ = tree_attention_ref(q, k, v, tree_mask, prefix_len, scale=scale, **rest)
    else:
        out, _ = paged_tree_attention_ref(q, k, v, slots[:, None], tree_mask, prefix_len, scale=scale, **rest)
    return out.flatten(2)
