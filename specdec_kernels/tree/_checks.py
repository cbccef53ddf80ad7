"""What a draft tree must satisfy, and the parent pointers behind leaf paths and masks. Every error names its node."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import index

from torch import Tensor


def as_ints(name: str, values: Iterable[int] | Tensor) -> tuple[int, ...]:
    """Return ``values`` as a tuple of Python ints; TypeError when they are not a sequence of integers."""
    values = values.tolist() if isinstance(values, Tensor) else values
    try:
        return tuple(map(index, values))
    except TypeError:
        raise TypeError(f"DraftTree: {name} must be a sequence of integers, got {values!r}") from None


def check_parents(parents: Sequence[int]) -> None:
    """Raise ValueError unless ``parents`` is a topological tree."""
    if not parents or parents[0] != -1:
        raise ValueError(f"DraftTree: node 0 must be the root, parents[0] == -1, got parents {list(parents[:8])}")
    for node, parent in enumerate(parents[1:], start=1):
        if parent == -1:
            raise ValueError(f"DraftTree: node {node} has no parent, but only node 0 may be a root")
        if not -1 < parent < len(parents):
            raise ValueError(f"DraftTree: node {node} has parent {parent}, outside [0, {len(parents) - 1}]")
        if parent >= node:
            kind = "it is on a cycle" if _is_on_cycle(parents, node) else "the nodes are not in topological order"
            raise ValueError(f"DraftTree: node {node} has parent {parent}, but parents[i] < i must hold: {kind}")


def _is_on_cycle(parents: Sequence[int], node: int) -> bool:
    ancestor = parents[node]
    for _ in parents:
        if ancestor == node:
            return True
        if not 0 <= ancestor < len(parents):
            return False
        ancestor = parents[ancestor]
    return False


def check_ranks(parents: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise ValueError unless ranks fit: one for each node, 0 for the root, different between siblings."""
    if len(ranks) != len(parents):
        raise ValueError(f"DraftTree: ranks must have one entry for each of {len(parents)} nodes, got {len(ranks)}")
    if ranks[0] != 0:
        raise ValueError(f"DraftTree: the root's rank must be 0, got {ranks[0]}")
    holders: dict[tuple[int, int], int] = {}
    for node, (parent, rank) in enumerate(zip(parents, ranks, strict=True)):
        if rank < 0:
            raise ValueError(f"DraftTree: node {node} has rank {rank}, ranks must be >= 0")
        other = holders.setdefault((parent, rank), node)
        if other != node:
            raise ValueError(f"DraftTree: nodes {other} and {node} are the same path: parent {parent}, rank {rank}")


def sibling_order(parents: Sequence[int]) -> tuple[int, ...]:
    """Return ranks that number siblings 0, 1, 2, … in node order."""
    counts = dict.fromkeys(parents, 0)
    ranks = []
    for parent in parents:
        ranks.append(counts[parent])
        counts[parent] += 1
    return tuple(ranks)


def parents_from_rows(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the parent pointers behind a table of leaf paths padded with −1."""
    parents = {0: -1}
    for i, row in enumerate(rows):
        nodes = [node for node in row if node != -1]
        if not nodes:
            continue
        if any(node < 0 for node in nodes):
            raise ValueError(f"DraftTree: row {i} of the table has node {min(nodes)}; only -1 pads: {list(row)}")
        if list(row[: len(nodes)]) != nodes:
            raise ValueError(f"DraftTree: row {i} of the table has a -1 before a node: {list(row)}")
        if nodes[0] != 0:
            raise ValueError(f"DraftTree: row {i} of the table must start at the root, node 0: {list(row)}")
        for parent, node in pairwise(nodes):
            if parents.setdefault(node, parent) != parent:
                raise ValueError(f"DraftTree: node {node} has two parents, {parents[node]} and {parent} (row {i})")
    missing = next((node for node in range(len(parents)) if node not in parents), None)
    if missing is not None:
        raise ValueError(f"DraftTree: node {missing} is on no row of the table, but node {max(parents)} is")
    return [parents[node] for node in range(len(parents))]


def check_rows_end_in_leaves(rows: Sequence[Sequence[int]], parents: Sequence[int]) -> None:
    """Raise ValueError when a row of the table stops above a leaf, two rows are the same path, or there is no row."""
    inner, row_of_end = set(parents), dict[int, int]()
    for i, row in enumerate(rows):
        end = next((node for node in reversed(row) if node != -1), None)
        if end is None:
            continue
        if end in inner:
            raise ValueError(f"DraftTree: row {i} of the table ends at node {end}, which is not a leaf: {list(row)}")
        if row_of_end.setdefault(end, i) != i:
            raise ValueError(f"DraftTree: rows {row_of_end[end]} and {i} of the table are the same path: {list(row)}")
    if not row_of_end:
        raise ValueError("DraftTree: the table has no path; a root alone is [[0]]")


def parents_from_rows_of_mask(rows: Sequence[Sequence[bool]]) -> list[int]:
    """Return the parent pointers behind a dense ancestor mask: a node's parent is the latest node it sees."""
    seen = [{node for node, visible in enumerate(row) if visible} for row in rows]
    return [_parent_from_seen(node, seen) for node in range(len(seen))]


def _parent_from_seen(node: int, seen: Sequence[set[int]]) -> int:
    if node not in seen[node]:
        raise ValueError(f"DraftTree: mask is not reflexive: node {node} does not see itself")
    latest = max(seen[node])
    if latest > node:
        raise ValueError(f"DraftTree: mask is not in topological order: node {node} sees the later node {latest}")
    if 0 not in seen[node]:
        raise ValueError(f"DraftTree: node {node} does not see the root, node 0")
    ancestors = seen[node] - {node}
    if not ancestors:
        return -1
    parent = max(ancestors)
    unseen, extra = seen[parent] - ancestors, ancestors - seen[parent]
    if unseen:
        raise ValueError(
            f"DraftTree: mask is not transitive: node {node} sees {parent}, which sees {min(unseen)}, "
            f"but node {node} does not see {min(unseen)}"
        )
    if extra:
        raise ValueError(f"DraftTree: node {node} sees two branches, nodes {max(extra)} and {parent}")
    return parent
