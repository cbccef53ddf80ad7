"""What a decoder layer does between its linear layers, in plain torch."""

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``(..., C)``; see `specdec_kernels.rms_norm`."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype)).contiguous()


def rotary_cache_write_ref(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_len: Tensor,
    *,
    first_node: int,
    slots: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Rotate q in place and write K and V; see `specdec_kernels.rotary_cache_write_`."""
    batch, num_nodes, num_heads, _ = qkv.shape
    num_kv_heads = k_cache.shape[2]
    q, k, v = qkv.split([num_heads - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=2)
    rows = prefix_len.to(torch.int64).unsqueeze(1) + first_node + torch.arange(num_nodes, device=qkv.device)
    batch_index = (torch.arange(batch, device=qkv.device) if slots is None else slots.to(torch.int64)).unsqueeze(1)
    k_cache.index_put_((batch_index, rows), _rotated(_normed(k, k_norm, eps), cos, sin))
    v_cache.index_put_((batch_index, rows), v)
    q.copy_(_rotated(_normed(q, q_norm, eps), cos, sin))


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm_ref(x, weight, eps)


def _rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None or sin is None:
        return x
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)
