"""Tree attention of one layer against what torch offers: sdpa with a dense mask, in its three forms, and compilers.

``python -m benchmarks.bench_tree_attention`` prints how much memory the CPU kernel needs beside its inputs and results.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels import tree_attention
from specdec_kernels.reference.tree_attention import tree_attention_ref
from specdec_kernels.testing import random_parents
from specdec_kernels.tree import mask_from_parents, unpack_mask

from .cases import MODELS
from .harness import Cost

OP = "tree_attention"
OURS = ("specdec_kernels",)


@dataclass(frozen=True)
class Case:
    """One verification step of one layer: every row of the batch has the same prefix length, as dense masks need.

    Attributes:
        compiled: also run `torch.compile` of the reference and FlexAttention, which compile for minutes.
    """

    model: str
    nodes: int
    prefix: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False


def _case_id(case: Case) -> str:
    name = f"{case.model}-B{case.batch}-P{case.prefix}-T{case.nodes}-{str(case.dtype)[6:]}"
    return f"{name}-compiled" if case.compiled else name


def _cases() -> list[Case]:
    """List the cases by what they show: prefix lengths, precision, batches, models, compilers."""
    main = [Case("llama3_8b", nodes, prefix) for prefix in (512, 4096, 16384) for nodes in (1, 16, 26, 64)]
    rest = [replace(case, dtype=torch.float32) for case in main if case.prefix == 4096]
    rest += [Case("llama3_8b", nodes, 1024, batch) for batch in (8, 32) for nodes in (1, 26)]
    rest += [
        Case(model, nodes, prefix)
        for model in ("smollm2_135m", "llama3_70b_tp8", "qwen3_8b")
        for prefix in (128, 1024, 4096, 32768)
        for nodes in (1, 8, 26, 64, 128)
    ]
    rest += [Case("llama3_8b", 1, 131072), Case("llama3_70b_tp8", 26, 131072)]
    rest += [Case(model, 26, 4096, compiled=True) for model in ("llama3_8b", "smollm2_135m")]
    return main + rest


CASES = {_case_id(case): case for case in _cases()}


@dataclass(frozen=True)
class Inputs:
    """``q (B,T,Hq,D)``, caches ``(B,Hk,S,D)`` as Hugging Face keeps them, and both kinds of mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    tree_mask: Tensor
    prefix_len: Tensor
    bias: Tensor  # (T, S): 0 or -inf

    @property
    def group_size(self) -> int:
        """Return how many query heads share a KV head."""
        return self.q.shape[2] // self.k.shape[1]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draw a random tree over a random cache that ends with the draft block."""
    model = MODELS[case.model]
    generator = torch.Generator().manual_seed(0)
    rows = case.prefix + case.nodes

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    mask = mask_from_parents(torch.tensor([random_parents(case.nodes, 0)]))
    visible = torch.cat([torch.ones(case.nodes, case.prefix, dtype=torch.bool), unpack_mask(mask, case.nodes)[0]], 1)
    return Inputs(
        draw(case.batch, case.nodes, model.num_heads, model.head_dim),
        draw(case.batch, model.num_kv_heads, rows, model.head_dim),
        draw(case.batch, model.num_kv_heads, rows, model.head_dim),
        mask.to(device),
        torch.full((case.batch,), case.prefix, dtype=torch.int32, device=device),
        torch.zeros(case.nodes, rows).masked_fill(~visible, -torch.inf).to(device, case.dtype),
    )


def cost(case: Case) -> Cost:
    """Read every row of K and V and q once; multiply each query with the prefix and with half of the draft block."""
    model = MODELS[case.model]
    rows = case.batch * (case.prefix + case.nodes)
    queries = case.batch * case.nodes * model.num_heads
    read = (2 * rows * model.num_kv_heads + queries) * model.head_dim * case.dtype.itemsize
    flops = 4 * queries * (case.prefix + case.nodes // 2) * model.head_dim
    return Cost(read, 0, flops, str(case.dtype)[6:])


def check(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Require a relative error in norm below what a wrong key or mask would cause; rounding is tested elsewhere."""
    for have, want in zip(actual, expected, strict=True):
        error = (have.double() - want.double()).norm() / want.double().norm()
        assert error < (1e-2 if have.dtype == torch.bfloat16 else 1e-5), f"relative error {error:.2e}"


def providers(case: Case) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    """Return the reference, ours, and the baselines."""
    found: dict[str, Callable[[Inputs], list[Tensor]]] = {
        "reference": _reference,
        "specdec_kernels": _ours,
        "sdpa_folded": _sdpa_folded,
        "sdpa_gqa": _sdpa_gqa,
        "sdpa_expanded": _sdpa_expanded,
    }
    if case.compiled:
        found |= {"compiled_reference": _compiled_reference, "flex_attention": _FlexAttention()}
    return found


def _reference(inputs: Inputs) -> list[Tensor]:
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    return [tree_attention_ref(inputs.q, k, v, inputs.tree_mask, inputs.prefix_len)[0]]


def _ours(inputs: Inputs) -> list[Tensor]:
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    return [tree_attention(inputs.q, k, v, inputs.tree_mask, inputs.prefix_len)[0]]


def _sdpa_folded(inputs: Inputs) -> list[Tensor]:
    """Query heads of a KV head become rows: the fastest form on CPUs, nobody's default."""
    batch, nodes, heads, dim = inputs.q.shape
    group = inputs.group_size
    rows = inputs.q.unflatten(2, (-1, group)).transpose(1, 2).reshape(batch, heads // group, nodes * group, dim)
    bias = inputs.bias.repeat_interleave(group, 0) if nodes > 1 else None
    out = F.scaled_dot_product_attention(rows, inputs.k, inputs.v, attn_mask=bias)
    return [out.unflatten(2, (nodes, group)).transpose(1, 2).reshape(batch, nodes, heads, dim)]


def _sdpa_gqa(inputs: Inputs) -> list[Tensor]:
    bias = inputs.bias if len(inputs.bias) > 1 else None
    out = F.scaled_dot_product_attention(
        inputs.q.transpose(1, 2), inputs.k, inputs.v, attn_mask=bias, enable_gqa=inputs.group_size > 1
    )
    return [out.transpose(1, 2)]


def _sdpa_expanded(inputs: Inputs) -> list[Tensor]:
    """What transformers does for a model with grouped heads and a 4-D mask."""
    k, v = (x.repeat_interleave(inputs.group_size, 1) for x in (inputs.k, inputs.v))
    out = F.scaled_dot_product_attention(inputs.q.transpose(1, 2), k, v, attn_mask=inputs.bias)
    return [out.transpose(1, 2)]


def _compiled_reference(inputs: Inputs) -> list[Tensor]:
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    return [torch.compile(tree_attention_ref)(inputs.q, k, v, inputs.tree_mask, inputs.prefix_len)[0]]


class _FlexAttention:
    """FlexAttention with a block mask made once, as its users do."""

    def __init__(self) -> None:
        self._masks: dict[int, Any] = {}

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        nodes, rows = inputs.bias.shape
        visible = inputs.bias == 0

        def sees(_batch, _head, query, key):
            return visible[query, key]

        if id(inputs) not in self._masks:
            self._masks[id(inputs)] = create_block_mask(sees, None, None, nodes, rows, device=inputs.q.device.type)
        out = torch.compile(flex_attention)(
            inputs.q.transpose(1, 2), inputs.k, inputs.v, block_mask=self._masks[id(inputs)], enable_gqa=True
        )
        return [out.transpose(1, 2)]


def peak_extra_bytes(case: Case) -> int:
    """Return by how much one call raises the peak memory of this process, results not counted. Linux only."""
    inputs = make_inputs(case, torch.device("cpu"))
    _ours(make_inputs(replace(case, prefix=64, nodes=1), torch.device("cpu")))  # the code is loaded, threads run
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_bytes("VmRSS")
    out = _ours(inputs)
    return _status_bytes("VmHWM") - before - sum(x.nbytes for x in out)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    case = CASES["llama3_8b-B1-P16384-T64-bfloat16"]
    print(f"{_case_id(case)}: {peak_extra_bytes(case) / 2**20:.1f} MB beside inputs and results")
