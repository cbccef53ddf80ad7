"""Record a target's steps once for each shape and replay them: CUDA graphs. Not yet run on a GPU.

What a recording needs is tested on the CPU with a stand-in for the capture that, like a CUDA graph, keeps the tensor
operations and their memory, and whatever else was decided on the host while it was made.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decoding.budget import SIZES
from ..decoding.protocols import TargetOutput
from .cache import TreeCache
from .families import FAMILIES, reads_positions

# Where the steps of prepared models are recorded by themselves.
RECORDED_DEVICES = ("cuda",)
# Of a prepared model.
_ATTRIBUTE = "specdec_step_graphs"

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
    read their routing on the host, and those of dynamic or long RoPE their positions: they cannot be recorded. A replay
    calls no hooks, and computes with the weights where they lay.

    The outputs of a step are overwritten by the next one of the same shape. One run at a time: two at once would
    share caches (not checked; `prepare`'s are lent to one target at a time). Copies begin anew.

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
        self._options: dict[str, Any] = {"warm_up": warm_up, "min_capacity": min_capacity, "capture": capture}
        self._warm_up, self._min_capacity, self._capture = warm_up, min_capacity, capture
        self._runs: dict[StepKey, int] = {}
        self._recordings: dict[StepKey, _Recording] = {}
        self._caches: dict[tuple[int, int], TreeCache] = {}
        self._user: Callable[[], object] = _nobody
        self._weights: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(StepGraphs, sizes=self.sizes, **self._options), ()

    def cache(self, make: Callable[[int], TreeCache], batch_size: int, num_rows: int) -> TreeCache:
        """Return the cache, empty, for a batch of at most ``num_rows`` each; ``make(capacity)`` makes a new one."""
        capacity = self._min_capacity
        while capacity < num_rows:
            capacity *= 2
        key = batch_size, capacity
        if key not in self._caches:
            self._caches[key] = make(capacity)
        self._caches[key].reset()
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

    def run_step(
        self, run: Callable[..., TargetOutput], cache: TreeCache, ids: Tensor, tree_mask: Tensor, depths: Tensor
    ) -> TargetOutput:
        """Run a step of a target behind the rows of its cache.

        Args:
            run: ``(ids, tree_mask, depths) → output``, writes to ``cache``.
            cache: from `cache`.
            ids, tree_mask, depths: as in `HFTarget.forward`.
        """
        batch, num_nodes = ids.shape
        cache.begin_step(num_nodes)

        def step(ids: Tensor, tree_mask: Tensor, depths: Tensor, prefix_len: Tensor) -> Tensors:
            with cache.addressed_by(prefix_len):
                return run(ids, tree_mask, depths)[:2]

        key = StepKey(num_nodes, cache.capacity, batch, len(tree_mask))
        inputs = ids, tree_mask, depths.expand(len(tree_mask), -1), cache.prefix_len
        return TargetOutput(*self.run(key, step, inputs))

    def lend(self, user: object, weights: object) -> bool:
        """Say whether a user may have the caches, until it ends or calls `give_back`: nobody else has them.

        Args:
            user: is referred to weakly.
            weights: what recordings depend on; where it is not equal to that of the last user, they are forgotten.
        """
        if self._user() is not None:
            return False
        if weights != self._weights:
            self.clear()
        self._user, self._weights = weakref.ref(user), weights
        return True

    def give_back(self, user: object) -> None:
        """Let another one have what was lent."""
        if self._user() is user:
            self._user = _nobody

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._runs.clear()
        self._recordings.clear()
        self._caches.clear()


def attach_graphs(model: PreTrainedModel, graphs: StepGraphs) -> None:
    """Let the targets of a model take these by themselves, on a GPU."""
    vars(model)[_ATTRIBUTE] = graphs


def detach_graphs(module: torch.nn.Module) -> None:
    """Forget what `attach_graphs` attached, if it did."""
    vars(module).pop(_ATTRIBUTE, None)


def attached_graphs(model: PreTrainedModel, user: object) -> StepGraphs | None:
    """Return the model's own for a new target, or None where there are none, where they are lent, or cannot be used."""
    graphs = vars(model).get(_ATTRIBUTE)
    if graphs is None or model.device.type not in RECORDED_DEVICES:
        return None
    if "experts" in FAMILIES[model.config.model_type] or reads_positions(model.config):
        return None
    modules = [*model.modules()]
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        return None
    # A recording has the addresses of what it reads.
    tensors = chain(model.parameters(), model.buffers())
    weights = [id(module) for module in modules], [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]
    return graphs if graphs.lend(user, weights) else None


def _nobody() -> None:
    return None
