"""Inputs, the exact answer and plain torch's answer for tree attention: what its test files share."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.testing import assert_close_to_baseline, random_parents
from specdec_kernels.tree import mask_from_parents

T1_PARENTS = [-1, 0, 0, 1, 1, 2]
T1_VISIBLE = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def chain(num_nodes: int) -> list[int]:
    return list(range(-1, num_nodes - 1))


def paths(parents: list[int]) -> list[list[int]]:
    """Return each node's path from the root, itself last."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


@dataclass
class Case:
    """One call. ``parents`` holds one tree for each batch row, or one for all."""

    q: Tensor
    k: Tensor
    v: Tensor
    parents: list[list[int]]
    prefix: list[int]
    options: dict = field(default_factory=dict)

    @property
    def mask(self) -> Tensor:
        return mask_from_parents(torch.tensor(self.parents))

    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.mask.to(self.q.device), int32(*self.prefix).to(self.q.device)

    def tree(self, row: int) -> list[int]:
        return self.parents[row if len(self.parents) > 1 else 0]

    def row(self, row: int) -> "Case":
        """Return one batch row as a case of its own."""
        one = slice(row, row + 1)
        return Case(self.q[one], self.k[one], self.v[one], [self.tree(row)], [self.prefix[row]], self.options)


def make_case(
    batch=2, prefix=None, nodes=7, heads=(4, 2), dims=(16, 16), dtype=torch.float32, layout="bhsd", trees=1, **options
) -> Case:
    """Draw a case: random trees, a cache with a few spare rows, in the layout's memory order."""
    prefix = [37 - 5 * b for b in range(batch)] if prefix is None else list(prefix)
    (num_q_heads, num_kv_heads), (qk_dim, v_dim) = heads, dims
    capacity = max(prefix, default=0) + nodes + 3

    def cache(dim: int) -> Tensor:
        if layout == "bshd":
            return torch.randn(batch, capacity, num_kv_heads, dim).to(dtype)
        if layout == "bhsd":
            return torch.randn(batch, num_kv_heads, capacity, dim).to(dtype).transpose(1, 2)
        wide = torch.randn(capacity, batch, num_kv_heads, dim + 3).to(dtype)  # rows with gaps, batch inside
        return wide[..., :dim].transpose(0, 1)

    q = torch.randn(batch, nodes, num_q_heads + 2, qk_dim).to(dtype)[:, :, 1:-1]  # as cut from a fused projection
    parents = [random_parents(nodes, seed) for seed in range(trees)]
    return Case(q, cache(qk_dim), cache(v_dim), parents, prefix, options)


def to(case: Case, device) -> Case:
    """Move a case's tensors."""
    case.q, case.k, case.v = (x.to(device) for x in (case.q, case.k, case.v))
    return case


def visible_keys(case: Case, row: int, node_path: list[int]) -> list[int]:
    """Return the cache rows that the last node of a path sees."""
    start, position = case.prefix[row], case.prefix[row] + len(node_path) - 1
    keys = [(p, p) for p in range(start)] + [(start + depth, start + node) for depth, node in enumerate(node_path)]
    window = case.options.get("window") or math.inf
    return [key for where, key in keys if position - where < window]


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse`` in fp64, one node at a time, from the keys listed by `visible_keys`."""
    options = case.options
    group = case.q.shape[2] // case.k.shape[2]
    k, v = (
        (cache.double() * (1 if scale is None else scale.double().reshape(-1, 1))).repeat_interleave(group, 2)
        for cache, scale in ((case.k, options.get("k_scale")), (case.v, options.get("v_scale")))
    )
    scale = options.get("scale")
    q = case.q.double() * (case.q.shape[-1] ** -0.5 if scale is None else scale)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for row in range(q.shape[0]):
        for node, path in enumerate(paths(case.tree(row))):
            keys = visible_keys(case, row, path)
            scores = torch.einsum("hd,khd->hk", q[row, node], k[row, keys])
            if options.get("softcap"):
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            if options.get("sinks") is not None:
                scores = torch.cat([scores, options["sinks"].double()[:, None]], dim=1)
            lse[row, node] = scores.logsumexp(-1)
            weights = scores.softmax(-1)[:, : len(keys)]
            out[row, node] = torch.einsum("hk,khd->hd", weights, v[row, keys])
    return out, lse


def plain_torch(case: Case) -> tuple[Tensor, Tensor]:
    """Return what torch itself gives in q's dtype with a dense mask: sdpa, or by hand where sdpa lacks the option."""
    options, dtype = case.options, case.q.dtype
    batch, num_nodes, num_q_heads, qk_dim = case.q.shape
    group = num_q_heads // case.k.shape[2]
    k, v = (
        (cache.to(dtype) * (1 if scale is None else scale.to(dtype).reshape(-1, 1))).repeat_interleave(group, 2)
        for cache, scale in ((case.k, options.get("k_scale")), (case.v, options.get("v_scale")))
    )
    q, k, v = (x.transpose(1, 2) for x in (case.q, k, v))
    bias = torch.full((batch, 1, num_nodes, k.shape[2]), -math.inf, dtype=dtype)
    for row in range(batch):
        for node, path in enumerate(paths(case.tree(row))):
            bias[row, 0, node, visible_keys(case, row, path)] = 0
    bias = bias.expand(batch, num_q_heads, num_nodes, -1)
    if options.get("sinks") is not None:  # one more key: score = the sink, value = 0
        sink = options["sinks"].to(dtype)[None, :, None, None].expand(batch, -1, num_nodes, 1)
        bias = torch.cat([bias, sink], dim=-1)
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
    scale = qk_dim**-0.5 if options.get("scale") is None else options["scale"]
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        out = (scores + bias).to(dtype).softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return out.transpose(1, 2), (scores + bias).logsumexp(-1).transpose(1, 2)


def check(case: Case, result: tuple[Tensor, Tensor]) -> None:
    """Require shapes, dtypes, layout, and an error within twice that of plain torch."""
    (out, lse), (exact_out, exact_lse) = result, exact(case)
    assert out.dtype == case.q.dtype
    assert out.is_contiguous()
    assert lse.is_contiguous()
    if out.dtype == torch.float64:  # as exact as the reference itself
        torch.testing.assert_close((out.cpu(), lse.cpu()), (exact_out, exact_lse))
        return
    plain_out, plain_lse = plain_torch(case)
    assert_close_to_baseline(out.cpu(), exact_out, plain_out)
    assert_close_to_baseline(lse.cpu(), exact_lse, plain_lse)
