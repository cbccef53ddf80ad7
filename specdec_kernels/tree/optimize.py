"""The best draft tree for a node budget, or for a machine, from how often each head's candidates are right."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from .build import DraftTree

# Accuracies come from counts, and their sums from floating point.
_SUM_TOLERANCE = 1e-6


def optimize_tree(
    accuracies: Sequence[Sequence[float]] | Tensor, num_nodes: int, *, max_children: int | None = None
) -> tuple[DraftTree, float]:
    """Find the tree of at most ``num_nodes`` nodes that yields the most tokens per step.

    A node is accepted when every head on its path was right with the rank the path names. Taking heads as independent,

        P(node) = Π_h accuracies[h][rank_h],        tokens per step = Σ_nodes P(node),

    where the root counts 1: it stands for the token each step yields anyhow. No node is likelier than its parent, so
    taking the likeliest nodes one after another gives a tree, and no other tree of that size has a greater sum.

    Args:
        accuracies: ``accuracies[h][r]`` is the probability that candidate ``r`` of head ``h`` (depth ``h + 1``) is
            the right token. Not cumulative over ranks; ranks need not be in order; heads may have different numbers
            of ranks.
        num_nodes: the budget ``T >= 1``, root included. The tree is smaller when no node of positive probability is
            left.
        max_children: at most this many children for each node; None for no limit.

    Returns:
        The tree and its expected tokens per step. Equal gains are ordered by depth, then by path, so the result is
        deterministic.

    Raises:
        ValueError: a budget or limit below 1, no head, a head without ranks, an accuracy outside [0, 1], or accuracies
            of one head that add up to more than 1.

    Example:
        >>> tree, tokens = optimize_tree([[0.6, 0.2], [0.5, 0.1]], num_nodes=4)
        >>> tree.to_choices(), round(tokens, 2)
        ([[0], [1], [0, 0]], 2.1)

    Source: Medusa (arXiv:2401.10774), "Searching for the optimized tree construction".
    """
    tree, gains = grow_tree(accuracies, num_nodes, max_children=max_children)
    return DraftTree.from_choices(tree.to_choices()), math.fsum(gains)


def grow_tree(
    accuracies: Sequence[Sequence[float]] | Tensor, num_nodes: int, *, max_children: int | None = None
) -> tuple[DraftTree, list[float]]:
    """Find the best trees of all sizes up to ``num_nodes`` at once: the first *n* nodes are the best tree of *n* nodes.

    So a tree is made smaller by cutting off its last nodes: `DraftTree.prefix`.

    Args:
        accuracies, num_nodes, max_children: as in `optimize_tree`.

    Returns:
        The tree, its nodes in the order of their gains, and each node's gain, the probability that it is accepted:
        the sum of the first *n* gains is the expected tokens per step of the first *n* nodes.

    Raises:
        ValueError: as `optimize_tree`.

    Example:
        >>> tree, gains = grow_tree([[0.6, 0.2], [0.5, 0.1]], num_nodes=4)
        >>> tree.parents, gains, tree.prefix(3).to_choices()
        ((-1, 0, 1, 0), [1.0, 0.6, 0.3, 0.2], [[0], [0, 0]])
    """
    heads = _check_accuracies("optimize_tree", accuracies)
    if num_nodes < 1:
        raise ValueError(f"optimize_tree: num_nodes must be >= 1, got {num_nodes}")
    if max_children is not None and max_children < 1:
        raise ValueError(f"optimize_tree: max_children must be >= 1 or None, got {max_children}")
    # A node's children in order of gain; only the best unused sibling and the best child wait in the heap.
    order = [[rank for _, rank in sorted((-p, r) for r, p in enumerate(row))][:max_children] for row in heads]

    nodes: dict[tuple[int, ...], int] = {(): 0}
    parents, gains = [-1], [1.0]
    heap: list[tuple[float, int, tuple[int, ...], int, float]] = []

    def offer(parent: tuple[int, ...], parent_gain: float, position: int) -> None:
        depth = len(parent)
        if depth < len(heads) and position < len(order[depth]):
            rank = order[depth][position]
            gain = parent_gain * heads[depth][rank]
            if gain > 0:
                heapq.heappush(heap, (-gain, depth, (*parent, rank), position, parent_gain))

    offer((), 1.0, 0)
    while heap and len(gains) < num_nodes:
        negative_gain, _, path, position, parent_gain = heapq.heappop(heap)
        nodes[path] = len(gains)
        parents.append(nodes[path[:-1]])
        gains.append(-negative_gain)
        offer(path, -negative_gain, 0)
        offer(path[:-1], parent_gain, position + 1)
    return DraftTree.from_parents(parents, [0, *(path[-1] for path in list(nodes)[1:])]), gains


class SizedTree(NamedTuple):
    """A tree of some size, and what it is expected to give.

    Attributes:
        tree: its nodes in the order of their gains.
        tokens_per_step: expected.
        step_us: microseconds of a step with a tree of this size.
    """

    tree: DraftTree
    tokens_per_step: float
    step_us: float

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens per second of one row."""
        return self.tokens_per_step / self.step_us * 1e6


def fastest_tree(
    accuracies: Sequence[Sequence[float]] | Tensor,
    step_us: Callable[[int], float],
    max_nodes: int,
    *,
    max_children: int | None = None,
) -> tuple[SizedTree, list[SizedTree]]:
    """Find the tree that yields the most tokens per second, by what a step costs on a machine.

        tokens/s (T)  =  most tokens per step of any tree of T nodes / time of a step with T nodes

    The time is taken to depend on the number of nodes alone, so the best tree of each size is the one with the most
    tokens per step, and only the sizes are to be tried: all of them.

    Args:
        accuracies, max_children: as in `optimize_tree`.
        step_us: gives the time of a step with so many nodes, drafting included, in any one unit.
        max_nodes: the largest size tried.

    Returns:
        The best one (the smaller of equals), and all sizes that were tried, from 1 on.

    Raises:
        ValueError: as `optimize_tree`; also a time that is not positive.

    Example:
        >>> best, _ = fastest_tree([[0.6, 0.2], [0.5, 0.1]], lambda nodes: 10 + nodes, max_nodes=8)
        >>> best.tree.num_nodes, round(best.tokens_per_step, 2)
        (4, 2.1)
    """
    largest, gains = grow_tree(accuracies, max_nodes, max_children=max_children)
    sizes = []
    for num_nodes in range(1, largest.num_nodes + 1):
        time_us = step_us(num_nodes)
        if not time_us > 0:
            raise ValueError(f"fastest_tree: step_us({num_nodes}) must be positive, got {time_us}")
        sizes.append(SizedTree(largest.prefix(num_nodes), math.fsum(gains[:num_nodes]), time_us))
    return max(sizes, key=lambda sized: sized.tokens_per_s), sizes


def expected_tokens(tree: DraftTree, accuracies: Sequence[Sequence[float]] | Tensor) -> float:
    """Return the expected tokens per step of a tree, heads taken as independent; see `optimize_tree`.

    Args:
        tree: any draft tree.
        accuracies: as in `optimize_tree`.

    Raises:
        ValueError: bad accuracies, a tree deeper than the heads, or a rank that its head has no accuracy for.

    Example:
        >>> round(expected_tokens(DraftTree.chain(2), [[0.6, 0.2], [0.5, 0.1]]), 2)
        1.9
    """
    return math.fsum(node_gains(tree, accuracies))


def node_gains(tree: DraftTree, accuracies: Sequence[Sequence[float]] | Tensor) -> list[float]:
    """Return the probability that each node of a tree is accepted, heads taken as independent; the root's is 1.

    Args:
        tree, accuracies: as in `expected_tokens`.

    Raises:
        ValueError: as `expected_tokens`.

    Example:
        >>> node_gains(DraftTree.chain(2), [[0.6, 0.2], [0.5, 0.1]])
        [1.0, 0.6, 0.3]
    """
    heads = _check_accuracies("expected_tokens", accuracies)
    tree.check_heads(num_heads=len(heads))
    gains = [1.0]
    for node in range(1, tree.num_nodes):
        head, rank = tree.depths[node] - 1, tree.ranks[node]
        if rank >= len(heads[head]):
            raise ValueError(
                f"expected_tokens: node {node} has rank {rank}, but accuracies[{head}] has {len(heads[head])} ranks"
            )
        gains.append(gains[tree.parents[node]] * heads[head][rank])
    return gains


def _check_accuracies(name: str, accuracies: Sequence[Sequence[float]] | Tensor) -> list[list[float]]:
    rows = accuracies.tolist() if isinstance(accuracies, Tensor) else accuracies
    try:
        heads = [[float(0.0 + value) for value in row] for row in rows]
    except TypeError:
        raise TypeError(f"{name}: accuracies must be numbers [heads][ranks], got {accuracies!r}") from None
    if not heads:
        raise ValueError(f"{name}: accuracies must have at least one head, got none")
    for h, row in enumerate(heads):
        if not row:
            raise ValueError(f"{name}: accuracies[{h}] must have at least one rank, got none")
        for r, value in enumerate(row):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: accuracies[{h}][{r}] must be in [0, 1], got {value}")
        if math.fsum(row) > 1 + _SUM_TOLERANCE:
            raise ValueError(
                f"{name}: accuracies[{h}] must add up to at most 1, got {math.fsum(row):.6g}; "
                "they are marginal, not cumulative over ranks"
            )
    return heads
