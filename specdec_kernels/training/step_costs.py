"""Time the steps of a target by their sizes, and what a drafter brings and costs."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from ..decoding.acceptance import GreedyAcceptance
from ..decoding.budget import CostPoint, CostTable, FixedBudget
from ..decoding.calibration import DrafterProfile
from ..decoding.loop import decode
from ..decoding.protocols import Drafter
from ..decoding.stats import DecodeStats
from ..hf.target import HFTarget
from ..tree.mask import depths_from_mask, mask_from_parents
from .layer_costs import timed_us

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WARM_UP_ROUNDS = 2
# What a step does outside the forward. The prefill is not part of any step.
_REST = ("propose", "verify", "compact", "emit")


class StepProbe:
    """A target with random contexts, whose steps of any number of nodes can be timed; nothing is committed.

    The nodes are a binary tree: what a step takes does not depend on the shape of its tree.

    Args:
        model: the causal LM, plain or prepared.
        batch_size: ``B``.
        context_len: committed tokens of each row.
        max_nodes: the largest step.
    """

    def __init__(self, model, batch_size: int, context_len: int, max_nodes: int):
        self._device = model.device
        generator = torch.Generator().manual_seed(0)
        size = (batch_size, max(context_len, max_nodes))
        self._ids = torch.randint(model.config.vocab_size, size, generator=generator).to(self._device)
        self._target = HFTarget(model, batch_size, context_len + max_nodes)
        lengths = torch.full((batch_size,), context_len, dtype=torch.int32, device=self._device)
        self._target.prefill(self._ids[:, :context_len], lengths)

    def time_us(self, num_nodes: int) -> float:
        """Run a step once and return its time."""
        parents = [-1, *((node - 1) // 2 for node in range(1, num_nodes))]
        mask = mask_from_parents(torch.tensor([parents], dtype=torch.int32, device=self._device))
        ids, depths = self._ids[:, :num_nodes], depths_from_mask(mask)
        return timed_us(lambda: self._target.forward(ids, mask, depths), self._device)


def median_times(probes: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Return the median of what each probe measures; they take turns, so that a slow moment falls on all of them."""
    times: list[list[float]] = [[] for _ in probes]
    for turn in range(repeats + WARM_UP_ROUNDS):
        for probe, values in zip(probes, times, strict=True):
            value = probe()
            if turn >= WARM_UP_ROUNDS:
                values.append(value)
    return [median(values) for values in times]


def measure_steps(
    model,
    *,
    nodes: Iterable[int] = NODES,
    batch_sizes: Iterable[int] = (1,),
    context_lens: Iterable[int] = (256,),
    max_rows: int = 512,
    max_tokens: int = 8192,
    repeats: int = 7,
) -> CostTable:
    """Measure what a step of a model takes, for every batch size, context and number of nodes.

    Args:
        model: the causal LM, plain or prepared, in the dtype to be used.
        nodes: numbers of nodes.
        batch_sizes, context_lens: of the steps.
        max_rows: steps of more rows, ``B · T``, are left out, but never the two smallest of a batch size. The table
            draws lines between what was measured, and goes on with the last of them.
        max_tokens: batches of more tokens, ``B · context``, are left out, but never the smallest context.
        repeats: medians of so many.
    """
    points = []
    contexts = sorted(context_lens)
    cells = [(b, c) for b in sorted(batch_sizes) for c in contexts if c == contexts[0] or b * c <= max_tokens]
    for batch, context in tqdm(cells, desc="timing steps", unit="size"):
        sizes = sorted(set(nodes))
        sizes = [n for i, n in enumerate(sizes) if i < 2 or batch * n <= max_rows]
        probe = StepProbe(model, batch, context, max(sizes))
        times = median_times([lambda n=n, probe=probe: probe.time_us(n) for n in sizes], repeats)  # type: ignore[misc]
        points += [CostPoint(batch, context, n, us) for n, us in zip(sizes, times, strict=True)]
    return CostTable(points)


def profile_drafter(
    model,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    batch_sizes: Iterable[int] = (1,),
    max_new_tokens: int = 64,
    eos_ids: Sequence[int] = (),
) -> DrafterProfile:
    """Decode prompts greedily, and count which nodes are accepted and what the steps take outside the forward.

    All prompts are decoded one by one with whole drafts. Times come from further, shorter runs over the first prompts:
    at each batch size with drafts of at most one and two nodes, and with whole ones.

    Args:
        model: the target.
        drafter: with the largest drafts that are ever to be used.
        prompts: token ids; repeated where a batch needs more.
        batch_sizes: at which the times are taken.
        max_new_tokens: of each prompt.
        eos_ids: end a text.
    """
    stats = DecodeStats()
    for prompt in tqdm(prompts, desc="counting accepted nodes", unit="prompt"):
        _run(model, drafter, [prompt], max_new_tokens, eos_ids, stats)
    points = []
    sizes = sorted({1, min(2, drafter.max_nodes), drafter.max_nodes})
    cells = [(batch, size) for batch in sorted(batch_sizes) for size in sizes]
    for batch, size in tqdm(cells, desc="timing drafts", unit="size"):
        rows = [prompts[row % len(prompts)] for row in range(batch)]
        timed = DecodeStats()
        _run(model, drafter, rows, min(max_new_tokens, 4), (), DecodeStats(), FixedBudget(size))  # warms up
        _run(model, drafter, rows, max_new_tokens // 2, (), timed, FixedBudget(size))
        rest = sum(timed.phase_time_us[phase] for phase in _REST) / timed.num_steps
        widest = len(timed.width_histogram) - 1
        points.append(CostPoint(batch, max(map(len, rows)), size if size <= 2 else widest, rest))
    return DrafterProfile(stats.node_gains, stats.width_histogram, CostTable(points), stats.num_row_steps)


def _run(
    model: Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_ids: Sequence[int],
    stats: DecodeStats,
    budget: FixedBudget | None = None,
) -> None:
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=model.device)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    capacity = ids.shape[1] + max_new_tokens - 1 + drafter.max_nodes
    steps = decode(
        HFTarget(model, len(prompts), capacity),
        drafter,
        ids.to(model.device),
        lengths,
        acceptance=GreedyAcceptance(),
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        stats=stats,
        budget=budget,
    )
    for _ in steps:
        pass
