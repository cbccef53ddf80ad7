"""Attention of draft-tree nodes over the committed prefix and their own ancestors, in plain torch.

Query heads are folded into rows of their KV head, so K and V are never repeated; everything is computed in fp32 (fp64
for fp64). The softmax is written out, because log-sum-exp, sinks and softcap are wanted; on the CPU torch's fused
kernel, which returns the log-sum-exp, serves all cases that it can.

Letters: ``B`` batch, ``T`` nodes, ``S`` cache rows, ``Hq``/``Hk`` heads, ``G = Hq / Hk``, ``D`` head dim, ``W`` mask
words.
"""

import torch
from torch import Tensor

# Elements of the largest temporary: scores, or K and V in fp32. Larger problems go in blocks of batch rows and nodes.
_BLOCK_ELEMENTS = 2**25


def tree_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tree_mask: Tensor,
    prefix_len: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``; see `specdec_kernels.tree_attention`."""
    batch, num_nodes, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = (batch, num_nodes, num_kv_heads, num_q_heads // num_kv_heads)
    out = q.new_empty(*grouped, v_cache.shape[-1])
    lse = torch.empty(grouped, dtype=dtype, device=q.device)

    num_keys = _visible_len(k_cache.shape[1], prefix_len, num_nodes)
    visible = _visible_keys(tree_mask, prefix_len, num_nodes, num_keys, window)
    scale = head_dim**-0.5 if scale is None else scale
    if sinks is not None:
        sinks = sinks.to(dtype).view(num_kv_heads, 1, -1)

    rows_step = max(1, _BLOCK_ELEMENTS // max(1, num_keys * num_kv_heads * head_dim))
    for rows in _steps(batch, rows_step):
        unseen = _unseen_keys(visible[rows])
        k = _read_cache(k_cache[rows, :num_keys], k_scale, unseen, dtype)
        v = _read_cache(v_cache[rows, :num_keys], v_scale, unseen, dtype)
        nodes_step = max(1, _BLOCK_ELEMENTS // (len(k) * num_q_heads * num_keys))
        for nodes in _steps(num_nodes, nodes_step):
            folded = q[rows, nodes].unflatten(2, grouped[2:]).transpose(1, 2).flatten(2, 3).to(dtype)
            block_out, block_lse = _attend(folded, k, v, visible[rows, nodes], scale, softcap, sinks)
            out[rows, nodes] = block_out.transpose(1, 2)
            lse[rows, nodes] = block_lse.transpose(1, 2)
    return out.flatten(2, 3), lse.flatten(2)


def paged_tree_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    tree_mask: Tensor,
    prefix_len: Tensor,
    **options,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, with the options of `tree_attention_ref`; see `specdec_kernels.paged_tree_attention`."""
    page_size, num_nodes = k_cache.shape[1], q.shape[1]
    num_keys = _visible_len(block_table.shape[1] * page_size, prefix_len, num_nodes)
    pages = block_table[:, : -(-num_keys // page_size)]
    # Entries of pages that a row does not reach may be anything: any valid page serves, its keys are not seen.
    starts = torch.arange(pages.shape[1], device=pages.device) * page_size
    pages = pages.masked_fill(starts >= prefix_len[:, None] + num_nodes, 0)
    k, v = k_cache[pages].flatten(1, 2), v_cache[pages].flatten(1, 2)
    return tree_attention_ref(q, k, v, tree_mask, prefix_len, **options)


def _visible_len(capacity: int, prefix_len: Tensor, num_nodes: int) -> int:
    """Return how many rows are worth looking at: up to the longest prefix where reading it is free, else all."""
    if prefix_len.device.type != "cpu" or prefix_len.numel() == 0:
        return capacity
    return min(int(prefix_len.max()) + num_nodes, capacity)


def _visible_keys(tree_mask: Tensor, prefix_len: Tensor, num_nodes: int, num_keys: int, window: int | None) -> Tensor:
    """Return ``(B, T, S) bool``: the prefix, and of the draft block the node and its ancestors, inside the window."""
    nodes = torch.arange(num_nodes, device=tree_mask.device)
    words = tree_mask if tree_mask.shape[-1] == 1 else tree_mask[..., nodes >> 6]
    ancestors = (words >> (nodes & 63)).bitwise_and_(1).bool()
    is_node = ancestors.diagonal(dim1=1, dim2=2)[..., None]

    batch = len(prefix_len)
    keys = torch.arange(num_keys, device=tree_mask.device)
    draft_rows = prefix_len[:, None] + nodes
    visible = (keys < prefix_len[:, None, None]) & is_node
    block = (batch, num_nodes, num_nodes)
    visible.scatter_(2, draft_rows[:, None].expand(block), ancestors.expand(block))
    if window is not None:
        positions = prefix_len[:, None] + ancestors.sum(-1) - 1
        key_positions = keys.expand(batch, num_keys).scatter(1, draft_rows, positions)
        visible &= positions[:, :, None] - key_positions[:, None, :] < window
    return visible


def _unseen_keys(visible: Tensor) -> Tensor | None:
    """Return ``(B, S) bool``, the keys that no node sees; None when it is cheap to know that there are none."""
    seen = visible.any(1)
    return None if seen.device.type == "cpu" and seen.all() else ~seen


def _read_cache(cache: Tensor, scale: Tensor | None, unseen: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``(B, S, Hk, D)`` as ``(B, Hk, S, D)`` in ``dtype``, dequantised, rows that no node sees replaced by zero.

    Those may hold NaN, and 0 · NaN is NaN.
    """
    rows = cache.transpose(1, 2).to(dtype)
    if scale is not None:
        rows = rows * scale.to(dtype).view(-1, 1, 1)
    return rows if unseen is None else rows.masked_fill(unseen[:, None, :, None], 0.0)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend ``q (B,Hk,T·G,D)`` to ``k, v (B,Hk,S,D)`` under ``visible (B,T,S)``; ``sinks (Hk,1,G)``.

    Returns ``(B,Hk,T,G,D)`` and the log-sum-exp ``(B,Hk,T,G)``.
    """
    batch, num_nodes, num_keys = visible.shape
    group_size = q.shape[2] // num_nodes
    bias = visible.to(q.dtype).log_()[:, None, :, None]  # 0 or −inf
    bias = bias.expand(batch, 1, num_nodes, group_size, num_keys).reshape(batch, 1, -1, num_keys)
    if softcap is None and q.device.type == "cpu" and k.shape[-1] == v.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
        lse = lse + bias.amax(-1)  # a row that sees nothing comes back with 0; it is to be −inf
    else:
        out, lse = _written_attention(q, k, v, bias, scale, softcap)
    out, lse = out.unflatten(2, (num_nodes, group_size)), lse.unflatten(2, (num_nodes, group_size))
    if sinks is not None:
        without_sink, lse = lse, torch.logaddexp(lse, sinks)
        out = out * (without_sink - lse).exp()[..., None]
    return out, lse


def _written_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores += bias
    # Finite for a row that sees nothing, so that its weights are 0 and not NaN.
    shift = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(shift).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v) / total.clamp(min=torch.finfo(v.dtype).tiny)
    return out, (shift + total.log()).squeeze(-1)


def _steps(size: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, size, step)]
