"""Record a target's steps once for each shape and replay them: CUDA graphs. Not yet run on a GPU.

What a recording needs is tested on the CPU with a stand-in for the capture that, like a CUDA graph, keeps the tensor
operations and their memory, and whatever else was decided on the host while it was made.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..decoding.budget import SIZES
from .cache import TreeCache

Tensors = tuple[Tensor, ...]
StepFunction = Callable[..., Tensors]
# (step, its inputs) → (its outputs, which each replay writes anew; the function that replays it).
Capture = Callable[[StepFunction, Tensors], tuple[Tensors, Callable[[], object]]]


class StepKey(NamedTuple):
    """What one recording is for.

    Attributes:
        num_nodes, batch_size: of the step.
        capacity: rows of the cache.
        num_trees: 1 when the rows of the batch share their tree, else the batch size.
    """

    num_nodes: int
    capacity: int
    batch_size: int
    num_trees: int


class _Recording(NamedTuple):
    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], object]


def capture_cuda(step: StepFunction, inputs: Tensors) -> tuple[Tensors, Callable[[], object]]:
    """Capture a step as a CUDA graph. Nothing in it may wait for the device or read a value on the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(*inputs)
    return outputs, graph.replay


class StepGraphs:
    """Keep the recorded steps of one model, and the caches that they write to, over many calls of ``generate``.

    ::

        new ── run, warm_up times ──▶ warm ── record ──▶ recorded ── replay, replay, …
                                                │
                                 the capture fails: its error is raised, the shape stays warm

    A recording belongs to one number of nodes, one batch size and one cache. So drafts should have few sizes (those of
    a `NodeBudget` are), and caches are made in few capacities, each twice the one before, and kept. Steps of other
    sizes, steps from which ended rows are left out, prompts and parts of the layers run as ever. Models with experts
    read their routing on the host and cannot be recorded.

    The outputs of a step are overwritten by the next one of the same shape. One run at a time: two at once would
    share caches (not checked).

    Args:
        sizes: numbers of nodes that are recorded; name the size of a tree that is not among these.
        warm_up: steps of each shape that run before one is recorded, so that kernels are compiled and memory is there.
        min_capacity: of the smallest cache.
        capture: makes a recording.

    Raises:
        ValueError: ``warm_up`` or ``min_capacity`` is below 1.

    Example:
        >>> graphs = StepGraphs()
        >>> generate(model, **inputs, drafter=drafter, graphs=graphs, budget=budget)
    """

    def __init__(
        self,
        *,
        sizes: Iterable[int] = SIZES,
        warm_up: int = 2,
        min_capacity: int = 256,
        capture: Capture = capture_cuda,
    ):
        for name, value in (("warm_up", warm_up), ("min_capacity", min_capacity)):
            if value < 1:
                raise ValueError(f"StepGraphs: {name} must be at least 1, got {value}")
        self.sizes = frozenset(sizes)
        self._warm_up, self._min_capacity, self._capture = warm_up, min_capacity, capture
        self._runs: dict[StepKey, int] = {}
        self._recordings: dict[StepKey, _Recording] = {}
        self._caches: dict[tuple[int, int], TreeCache] = {}

    def cache(self, make: Callable[[int], TreeCache], batch_size: int, num_rows: int) -> TreeCache:
        """Return the cache for a batch whose rows need at most ``num_rows``; ``make(capacity)`` makes a new one."""
        capacity = self._min_capacity
        while capacity < num_rows:
            capacity *= 2
        key = batch_size, capacity
        if key not in self._caches:
            self._caches[key] = make(capacity)
        return self._caches[key]

    def state(self, key: StepKey) -> str:
        """Return ``"new"``, ``"warm"`` or ``"recorded"``."""
        if key in self._recordings:
            return "recorded"
        return "warm" if self._runs.get(key, 0) >= self._warm_up else "new"

    def run(self, key: StepKey, step: StepFunction, inputs: Tensors) -> Tensors:
        """Run a step, or replay it with these inputs.

        Args:
            key: recordings are told apart by it; steps of one key must differ in the values of ``inputs`` alone.
            step: what is recorded.
            inputs: of shapes and dtypes that belong to the key.
        """
        if self.state(key) == "new":
            self._runs[key] = self._runs.get(key, 0) + 1
            return step(*inputs)
        if key not in self._recordings:
            kept = tuple(value.clone(memory_format=torch.contiguous_format) for value in inputs)
            self._recordings[key] = _Recording(kept, *self._capture(step, kept))
        recording = self._recordings[key]
        for own, value in zip(recording.inputs, inputs, strict=True):
            own.copy_(value)
        recording.replay()
        return recording.outputs

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._runs.clear()
        self._recordings.clear()
        self._caches.clear()
