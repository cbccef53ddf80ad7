"""What the blocks of a model cost on this machine, and what a draft that leaves some out is expected to gain."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..decoding.drafting import ChainLayout
from ..decoding.protocols import LayerPlan
from ..hf.target import HFTarget

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))


@dataclass(frozen=True)
class BlockCosts:
    """Microseconds of one decoding sequence.

    Attributes:
        attention_us, mlp_us: of each layer's blocks, for one node, their norms included.
        rest_us: what a forward of one node takes besides: embedding, last norm, projection, Python.
        verify_us: ``verify_us[d]``, a whole forward of a chain of ``d`` drafts and their root.
    """

    attention_us: tuple[float, ...]
    mlp_us: tuple[float, ...]
    rest_us: float
    verify_us: tuple[float, ...]

    def draft_us(self, plan: LayerPlan) -> float:
        """Return the time of one drafted token."""
        attention = sum(us for layer, us in enumerate(self.attention_us) if layer not in plan.skipped_attention)
        mlp = sum(us for layer, us in enumerate(self.mlp_us) if layer not in plan.skipped_mlp)
        return self.rest_us + attention + mlp


class Outcome(NamedTuple):
    """What a draft model did in some contexts.

    Attributes:
        matched: ``(n,) int64``; so many of its first drafts are what the target says.
        probs: ``(n, N)``; how probable each draft was.
    """

    matched: Tensor
    probs: Tensor


class Expectation(NamedTuple):
    """The best way to use a draft model, by expected speed.

    Attributes:
        tokens_per_s, tokens_per_step, drafts_per_step: expected.
        max_drafts, threshold: of the drafter that gets there.
    """

    tokens_per_s: float
    tokens_per_step: float
    drafts_per_step: float
    max_drafts: int
    threshold: float


def expectation(
    outcome: Outcome, costs: BlockCosts, draft_us: float, *, max_drafts: int, threshold: float
) -> Expectation:
    """Return the speed expected with a longest chain and a threshold.

    ``tokens/s = mean(min(matched, d) + 1) / mean(d · draft_us + verify_us[d])``, where a context drafts *d* tokens: up
    to and with the first one below the threshold. No time is measured here: the same outcome gives the same answer.
    """
    count = outcome.probs.shape[1]
    stops = torch.where(outcome.probs < threshold, torch.arange(1, count + 1), count).amin(1)
    drafts = stops.clamp_max(max_drafts)
    tokens = (torch.minimum(outcome.matched, drafts) + 1).double().mean()
    time_us = (drafts * draft_us + torch.tensor(costs.verify_us, dtype=torch.float64)[drafts]).mean()
    speed = float(tokens / time_us * 1e6)
    return Expectation(speed, float(tokens), float(drafts.double().mean()), max_drafts, threshold)


def best_expectation(outcome: Outcome, costs: BlockCosts, draft_us: float) -> Expectation:
    """Return what is expected with the best longest chain (of at least one draft) and threshold."""
    tried = (
        expectation(outcome, costs, draft_us, max_drafts=max_drafts, threshold=threshold)
        for threshold in THRESHOLDS
        for max_drafts in range(1, outcome.probs.shape[1] + 1)
    )
    return max(tried, key=lambda found: found.tokens_per_s)


@torch.no_grad()
def measure_costs(model, *, context_len: int, max_drafts: int, repeats: int = 25) -> BlockCosts:
    """Time a sequence of ``context_len`` tokens: every block for one node, and chains of every length.

    A layer is timed whole and without either block, as it runs while drafting. A block takes the mean of what it takes
    alone and of what it adds to the other one, so the two add up to the layer. Medians, everything in turn in each
    round, so that a slow moment falls on all of it.
    """
    target = HFTarget(model, 1, context_len + max_drafts + 1)
    device = model.device
    length = torch.tensor([context_len], dtype=torch.int32, device=device)
    target.prefill(torch.ones(1, context_len, dtype=torch.int64, device=device), length)
    layout = ChainLayout(max_drafts + 1, device)

    def forward(num_nodes: int, plan: LayerPlan | None = None) -> float:
        nodes = torch.ones(1, num_nodes, dtype=torch.int64, device=device), layout.mask(num_nodes)
        depths = layout.depths(num_nodes)
        if plan is None:
            return timed_us(lambda: target.forward(*nodes, depths), device)
        return timed_us(lambda: target.run_layers(*nodes, depths, plan), device)

    every = frozenset(range(len(model.base_model.layers)))
    plans = LayerPlan(), LayerPlan(skipped_mlp=every), LayerPlan(skipped_attention=every)
    nothing = LayerPlan(skipped_attention=every, skipped_mlp=every)
    chains, layers = list[list[float]](), list[list[list[float]]]()
    for round_index in tqdm(range(repeats + 2), desc="measuring costs", unit="round"):
        times = [forward(num_drafts + 1) for num_drafts in range(max_drafts + 1)] + [forward(1, nothing)]
        with _LayerTimer(model) as timer:
            for plan in plans:
                forward(1, plan)
        if round_index >= 2:  # the first ones warm up
            chains.append(times)
            layers.append(timer.times)
    *verify_us, rest_us = _medians(chains)
    per_layer = [_medians(rows) for rows in zip(*layers, strict=True)]
    attention_us = tuple(max(0.0, (whole + alone - other) / 2) for whole, alone, other in per_layer)
    mlp_us = tuple(max(0.0, (whole + other - alone) / 2) for whole, alone, other in per_layer)
    return BlockCosts(attention_us, mlp_us, rest_us, tuple(verify_us))


def _medians(rounds: Iterable[Sequence[float]]) -> list[float]:
    """Return the median of each column."""
    return [median(column) for column in zip(*rounds, strict=True)]


def timed_us(function: Callable[[], object], device: torch.device) -> float:
    """Run a function once and return its time in microseconds, the device's work included."""
    _wait(device)
    start = time.perf_counter_ns()
    function()
    _wait(device)
    return (time.perf_counter_ns() - start) / 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _LayerTimer:
    """Note how long every layer takes in each forward inside the ``with`` block; with hooks layers run one by one."""

    def __init__(self, model):
        self.device = model.device
        self.layers = [*model.base_model.layers]
        self.times: list[list[float]] = [[] for _ in self.layers]

    def __enter__(self) -> "_LayerTimer":
        self.handles = []
        for layer, times in zip(self.layers, self.times, strict=True):
            self.handles += [
                layer.register_forward_pre_hook(lambda *_: self._start()),
                layer.register_forward_hook(lambda *_, times=times: self._stop(times)),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _start(self) -> None:
        _wait(self.device)
        self.started = time.perf_counter_ns()

    def _stop(self, times: list[float]) -> None:
        _wait(self.device)
        times.append((time.perf_counter_ns() - self.started) / 1e3)
