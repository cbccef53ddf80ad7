"""Draft trees chosen anew at each step, each row its own: the likeliest nodes under a budget, grown on the device."""

import heapq
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .._validate import check_dtype, check_range, check_shape, values_readable
from ..reference.medusa_project import topk_lowest_id

# Up to so many paths to look at, a heap of Python numbers is faster than torch's dispatch on the CPU.
HOST_PATHS = 512


class GrownTrees(NamedTuple):
    """A tree for each row, all of one size.

    Attributes:
        columns: ``(B, T − 1) int64``, of nodes 1 … T − 1: ``c`` stands for candidate ``c % K`` of depth ``c // K + 1``.
        parents: ``(B, T) int32``, topological; nodes are numbered from the likeliest to the least likely.
        depths: ``(B, T) int32``.
        used: ``(B,) int32``, nodes of each row that are likely enough, the first ones; None when all are.
    """

    columns: Tensor
    parents: Tensor
    depths: Tensor
    used: Tensor | None


@dataclass(frozen=True)
class DynamicTree:
    """The shape of a draft that is decided at each step by how sure the drafter is; see `grow_best_first`.

    Attributes:
        num_nodes: ``T``, the budget, root included.
        top_k: candidates of each depth that are looked at, ``num_nodes − 1`` at most. Where the heads are unsure a good
            tree is broad: of 64 nodes with only ten candidates, it loses much of what it could gain.
        min_prob: nodes that the drafter thinks less likely are left out. A node is worth its time when its probability
            is above what it adds to a step, over the time of a step, times the tokens per step.

    Raises:
        ValueError: ``num_nodes`` is not in [1, 1024], ``top_k`` not in [1, 64], or ``min_prob`` not in [0, 1).
    """

    num_nodes: int
    top_k: int = 32
    min_prob: float = 0.0

    def __post_init__(self) -> None:
        check_range("DynamicTree", "num_nodes", self.num_nodes, 1, 1024)
        check_range("DynamicTree", "top_k", self.top_k, 1, 64)
        check_min_prob("DynamicTree", self.min_prob)

    def save(self, path: str | Path, /, **metadata) -> None:
        """Write ``{"dynamic": {"num_nodes": …, "top_k": …, "min_prob": …}, ...metadata}`` as JSON."""
        Path(path).write_text(json.dumps({"dynamic": asdict(self)} | metadata, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_metadata(cls, metadata: dict) -> "DynamicTree | None":
        """Return what `save` wrote, from the contents of the file; None when it holds another kind of tree."""
        return cls(**metadata["dynamic"]) if "dynamic" in metadata else None


def check_min_prob(who: str, min_prob: float) -> None:
    """Raise ValueError unless it is a probability that a node can have or exceed."""
    if not 0 <= min_prob < 1:
        raise ValueError(f"{who}: min_prob must be in [0, 1), got {min_prob}")


def num_grown(num_nodes: int, num_depths: int, top_k: int) -> int:
    """Return the nodes that `grow_best_first` gives: the budget, or all there are when those are fewer."""
    everything = sum(top_k**depth for depth in range(num_depths + 1))
    return min(num_nodes, everything)


def grow_best_first(log_probs: Tensor, num_nodes: int, min_prob: float = 0.0) -> GrownTrees:
    """Grow the tree of the likeliest nodes of each row.

    The candidates of a depth are the same below every node, as with Medusa's heads, so a node is a path of ranks, and

        log P(r₁ … r_d) = Σ_h log_probs[h, r_h]

    The ``T − 1`` likeliest paths are taken. No path is likelier than its beginning, so they form a tree, and no tree of
    that size promises more accepted tokens (Medusa's independence assumption, at this step's probabilities instead of
    average ones; EAGLE-2 ranks its drafts alike, Li et al. 2024, arXiv 2406.16858). Paths that are equally likely
    are ordered by depth, then by their beginning's place, then by rank.

        log-probabilities            budget 5: -0.2, -0.5 (= -0.2 - 0.3), -1.7 (= -0.2 - 1.5), -1.8
        depth 1   -0.2  -1.8              root ┬ 0 ┬ 00          parents  -1  0  1  1  0
        depth 2   -0.3  -1.5                   └ 1 └ 01          depths    0  1  2  2  1

    Level by level the ``T − 1`` best paths are kept, then the best of all levels: shapes depend on sizes alone, and
    nothing waits for the device.

    Args:
        log_probs: ``(B, M, K) fp32``: of the K candidates of each of M depths. Above 0 (by rounding) counts as 0; NaN
            as less likely than anything.
        num_nodes: ``T ≥ 1``. The trees are smaller when there are fewer paths, see `num_grown`.
        min_prob: in [0, 1): count as `GrownTrees.used` those nodes that are at least so likely. The shapes stay, since
            they may not depend on data.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, budget or probability.

    Example:
        >>> trees = grow_best_first(torch.tensor([[[-0.2, -1.8], [-0.3, -1.5]]]), 5)
        >>> trees.parents.tolist(), trees.columns.tolist()
        ([[-1, 0, 1, 1, 0]], [[0, 2, 3, 1]])
    """
    check_shape("grow_best_first", "log_probs", log_probs, ("B", "M", "K"))
    check_dtype("grow_best_first", "log_probs", log_probs, (torch.float32,))
    check_range("grow_best_first", "num_nodes", num_nodes, 1, 1024)
    check_min_prob("grow_best_first", min_prob)
    batch, num_depths, top_k = log_probs.shape
    budget = num_grown(num_nodes, num_depths, top_k) - 1
    roots = _roots(batch, log_probs.device)
    if budget == 0 or num_depths == 0:
        return roots
    if 0 < batch * (budget + 1) * top_k <= HOST_PATHS and values_readable(log_probs):
        return _grown_on_host(log_probs.clamp_max(0.0), budget, min_prob)
    scores, before, columns = _paths(log_probs.clamp_max(0.0), budget)
    best, chosen = topk_lowest_id(scores, budget)
    columns = columns.gather(1, chosen)
    nodes = torch.arange(1, budget + 1, device=chosen.device).expand(batch, -1)
    node_at = nodes.new_zeros(batch, scores.shape[1] + 1).scatter(1, chosen + 1, nodes)
    parents = node_at.gather(1, before.gather(1, chosen))
    return GrownTrees(
        columns,
        torch.cat([roots.parents, parents.to(torch.int32)], dim=1),
        torch.cat([roots.depths, (columns // top_k + 1).to(torch.int32)], dim=1),
        (best >= math.log(min_prob)).sum(1, dtype=torch.int32) + 1 if min_prob else None,
    )


def _paths(log_probs: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``budget`` best paths of each level, all levels side by side.

    Returns:
        ``(B, n)`` each: what the path promises; the place of its beginning, where 0 is the root and 1 the first path
        here; and the column of its last candidate.
    """
    batch, num_depths, top_k = log_probs.shape
    best = log_probs.new_zeros(batch, 1)
    scores: list[Tensor] = []
    before: list[Tensor] = []
    columns: list[Tensor] = []
    start, stop = 0, 1
    for depth in range(min(num_depths, budget)):
        longer = (best[:, :, None] + log_probs[:, depth, None, :]).flatten(1)
        best, picked = topk_lowest_id(longer, min(budget, longer.shape[1]))
        scores.append(best)
        before.append(picked // top_k + start)
        columns.append(picked % top_k + depth * top_k)
        start, stop = stop, stop + best.shape[1]
    return torch.cat(scores, dim=1), torch.cat(before, dim=1), torch.cat(columns, dim=1)


def _grown_on_host(log_probs: Tensor, budget: int, min_prob: float) -> GrownTrees:
    top_k = log_probs.shape[2]
    trees = [likeliest_paths(row, budget) for row in log_probs.tolist()]
    columns = [[(depth - 1) * top_k + rank for depth, _, rank in tree] for tree in trees]
    parents = [[-1, *(parent for _, parent, _ in tree)] for tree in trees]
    depths = [[0, *(depth for depth, _, _ in tree)] for tree in trees]
    shapes = torch.tensor([parents, depths], dtype=torch.int32, device=log_probs.device)
    grown = GrownTrees(torch.tensor(columns, device=log_probs.device), shapes[0], shapes[1], None)
    if not min_prob:
        return grown
    sizes = [1 + len(likeliest_paths(row, budget, min_prob)) for row in log_probs.tolist()]
    return grown._replace(used=torch.tensor(sizes, dtype=torch.int32, device=log_probs.device))


def likeliest_paths(
    log_probs: Sequence[Sequence[float]], budget: int, min_prob: float = 0.0
) -> list[tuple[int, int, int]]:
    """Do for one row what `grow_best_first` does, on Python numbers.

    Args:
        log_probs: fp32 numbers, none above 0, ``[depth][rank]``.
        budget: ``T − 1``, not more than there are paths.
        min_prob: of the paths; those below it, and NaN, are left out when it is above 0.

    Returns:
        Depth, parent and rank of nodes 1 … T − 1, likeliest first.
    """
    highest = as_fp32([-math.log(min_prob)])[0] if min_prob else math.inf
    # What orders paths: NaN or not, how unlikely, depth, parent, rank. A parent leaves the heap before its children.
    heap: list[tuple[bool, float, int, int, int]] = []
    tree: list[tuple[int, int, int]] = []
    node, depth, cost = 0, 0, 0.0
    while len(tree) < budget:
        if depth < len(log_probs):
            longer = as_fp32([cost - log_prob for log_prob in log_probs[depth]])
            for rank, path_cost in enumerate(longer):
                is_nan = path_cost != path_cost
                heapq.heappush(heap, (is_nan, 0.0 if is_nan else path_cost, depth + 1, node, rank))
        is_nan, cost, depth, parent, rank = heapq.heappop(heap)
        if min_prob and (is_nan or cost > highest):
            break
        cost = math.nan if is_nan else cost
        tree.append((depth, parent, rank))
        node = len(tree)
    return tree


def as_fp32(values: list[float]) -> list[float]:
    """Round sums and differences of two fp32 numbers as fp32 tensors do."""
    return array("f", values).tolist()


def _roots(batch: int, device: torch.device) -> GrownTrees:
    zeros = torch.zeros(batch, 1, dtype=torch.int32, device=device)
    return GrownTrees(zeros[:, :0].long(), zeros - 1, zeros, None)
