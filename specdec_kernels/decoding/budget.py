"""How many nodes a draft should have: as many as bring the most tokens per second on this machine."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

# The sizes drafts are cut to. Few, so that a device that records each shape of a step has few of them to keep.
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
# Contexts that are this close share one decision.
_CONTEXT_STEP = 64


class Budget(Protocol):
    """Limits the nodes of the drafts, step by step."""

    def choose(self, num_rows: int, context_len: int) -> int:
        """Return the most nodes that a draft may have, root included, at least 1.

        Args:
            num_rows: rows that go on.
            context_len: tokens that the longest of them has.
        """
        ...

    # One that learns also has `begin()`, which `decode` calls before the prompts, and `observe(num_nodes, accepted)`,
    # which it calls after every step: see `LearningBudget`.


class FixedBudget:
    """Allow always the same number of nodes.

    Raises:
        ValueError: ``max_nodes`` is below 1.

    Example:
        >>> FixedBudget(4).choose(num_rows=1, context_len=100)
        4
    """

    def __init__(self, max_nodes: int):
        if max_nodes < 1:
            raise ValueError(f"FixedBudget: max_nodes must be >= 1, got {max_nodes}")
        self.max_nodes = max_nodes

    def choose(self, num_rows: int, context_len: int) -> int:
        """Return it."""
        return self.max_nodes


class CostPoint(NamedTuple):
    """A measured time: of a step with ``num_nodes`` nodes in each of ``batch_size`` rows of ``context_len`` tokens."""

    batch_size: int
    context_len: int
    num_nodes: int
    time_us: float


class CostTable:
    """Times that were measured at some sizes, and straight lines between them.

    Along each of the three sizes the time between two measured points lies on the line through them; beyond the last
    one the line goes on, never downwards; below the first one the time is that of the first. Nodes first, then context,
    then batch. Each batch size may have contexts of its own, and each of these its own numbers of nodes.

    Args:
        points: any order; a later point replaces an earlier one of the same sizes.

    Raises:
        ValueError: no point, or a time that is not a positive number.

    Example:
        >>> table = CostTable([CostPoint(1, 256, 1, 10.0), CostPoint(1, 256, 5, 14.0), CostPoint(3, 256, 1, 20.0)])
        >>> table.time_us(3, batch_size=1, context_len=99), table.time_us(1, batch_size=2, context_len=256)
        (12.0, 15.0)
    """

    def __init__(self, points: Iterable[CostPoint | Sequence[float]]):
        self._curves: dict[int, dict[int, dict[int, float]]] = {}
        for batch_size, context_len, num_nodes, time_us in points:
            if not (time_us > 0 and math.isfinite(time_us)):
                raise ValueError(f"CostTable: times must be positive numbers, got {time_us}")
            curve = self._curves.setdefault(int(batch_size), {}).setdefault(int(context_len), {})
            curve[int(num_nodes)] = float(time_us)
        if not self._curves:
            raise ValueError("CostTable: there must be at least one point")

    @property
    def points(self) -> list[CostPoint]:
        """All points, sorted."""
        return sorted(
            CostPoint(batch, context, nodes, time_us)
            for batch, contexts in self._curves.items()
            for context, curve in contexts.items()
            for nodes, time_us in curve.items()
        )

    def time_us(self, num_nodes: int, batch_size: int, context_len: int) -> float:
        """Return the time of a step, in microseconds."""
        by_batch = {}
        for batch, contexts in self._curves.items():
            by_context = {context: _on_lines(curve, num_nodes) for context, curve in contexts.items()}
            by_batch[batch] = _on_lines(by_context, context_len)
        return _on_lines(by_batch, batch_size)


def _on_lines(values: dict[int, float], x: int) -> float:
    """Return the value at ``x`` on the lines through the points, see `CostTable`."""
    xs = sorted(values)
    if x <= xs[0] or len(xs) == 1:
        return values[xs[0]]
    right = min(bisect_left(xs, x), len(xs) - 1)
    x0, x1 = xs[right - 1], xs[right]
    slope = (values[x1] - values[x0]) / (x1 - x0)
    if x > x1:
        return values[x1] + max(0.0, slope) * (x - x1)
    return values[x0] + slope * (x - x0)


class NodeBudget:
    """Choose the size of the drafts that brings the most tokens per second at the present batch size and context.

    ::

        tokens/s (T)  =  B · (gains[0] + … + gains[T−1])  /  time of a step with B rows of T nodes

    A draft is made smaller by leaving out its last nodes, so a tree should have its nodes in the order of their gains
    (`specdec_kernels.tree.grow_tree`). A larger batch makes every node dearer, so the trees shrink as the batch grows,
    down to one node, plain decoding, where nothing is gained.

    Args:
        gains: ``gains[i]`` is the probability that node *i* is accepted; ``gains[0] == 1``, the token that every step
            yields. Not increasing in general, which is not needed.
        step_us: ``(num_nodes, batch_size, context_len) → microseconds`` of a whole step, drafting included.
        widths: ``widths[t]``: how often a draft has *t* nodes by itself, in any unit; for drafters that do not
            always find so many (n-grams). None: always all.
        sizes: those to choose from; 1 is always one of them, and so are all nodes.

    Raises:
        ValueError: no gains, the first is not 1, one outside [0, 1], a size below 1.

    Example:
        >>> budget = NodeBudget([1, 0.5, 0.3, 0.1], lambda nodes, rows, context: 100 + 10 * rows * nodes)
        >>> [budget.choose(rows, 256) for rows in (1, 8, 64)]
        [3, 2, 1]
    """

    def __init__(
        self,
        gains: Sequence[float],
        step_us: Callable[[int, int, int], float],
        *,
        widths: Sequence[float] | None = None,
        sizes: Iterable[int] = SIZES,
    ):
        self.gains = tuple(map(float, gains))
        if not self.gains or abs(self.gains[0] - 1) > 1e-9 or not all(0 <= gain <= 1 for gain in self.gains):
            raise ValueError(f"NodeBudget: gains must be probabilities, the first of them 1, got {self.gains}")
        chosen = {1, *sizes, len(self.gains)}
        if min(chosen) < 1:
            raise ValueError(f"NodeBudget: sizes must be at least 1, got {sorted(chosen)}")
        self.sizes = sorted(size for size in chosen if size <= len(self.gains))
        self._step_us = step_us
        self._widths = None if widths is None else [float(share) for share in widths]
        self._times_us: dict[tuple[int, int], dict[int, float]] = {}

    def tokens_per_step(self, num_nodes: int) -> float:
        """Return how many tokens a row is expected to emit in a step."""
        return math.fsum(self.gains[:num_nodes])

    def step_us(self, num_nodes: int, batch_size: int, context_len: int) -> float:
        """Return the expected time of a step whose drafts have at most so many nodes."""
        if self._widths is None:
            return self._step_us(num_nodes, batch_size, context_len)
        total = math.fsum(self._widths)
        time_us, below, count = 0.0, 0.0, 0.0
        for width, share in enumerate(self._widths):
            count += share
            # The batch is as wide as its widest row.
            at_most = (count / total) ** batch_size
            if at_most > below and width:
                time_us += (at_most - below) * self._step_us(min(width, num_nodes), batch_size, context_len)
            below = at_most
        return time_us

    def tokens_per_s(self, num_nodes: int, batch_size: int, context_len: int) -> float:
        """Return how many tokens per second all rows together are expected to emit."""
        time_us = self.step_us(num_nodes, batch_size, context_len)
        return batch_size * self.tokens_per_step(num_nodes) / time_us * 1e6

    def times_us(self, num_rows: int, context_len: int) -> Mapping[int, float]:
        """Return the expected times of steps by their size, ascending; contexts that are close share them."""
        key = num_rows, context_len // _CONTEXT_STEP
        if key not in self._times_us:
            context_len = key[1] * _CONTEXT_STEP + _CONTEXT_STEP // 2
            self._times_us[key] = {size: self.step_us(size, num_rows, context_len) for size in self.sizes}
        return self._times_us[key]

    def choose(self, num_rows: int, context_len: int) -> int:
        """Return the best size; the smaller one of equals."""
        return fastest(self.gains, self.times_us(num_rows, context_len))


def fastest(gains: Sequence[float], times_us: Mapping[int, float]) -> int:
    """Return the size with the most tokens per second; the smaller one of equals.

    Args:
        gains: of nodes, as `NodeBudget` has them.
        times_us: of steps, by ascending size.
    """
    tokens = list(accumulate(gains))
    return max(times_us, key=lambda size: tokens[size - 1] / times_us[size])
