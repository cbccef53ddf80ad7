"""Drafts in lists. Trees of a few nodes are made, merged and described faster there than by torch's dispatch.

A drafter that can draft so has ``drafts_on_host(pending)``, whether it would below these tokens ``(B,) int64``, and
``trees(pending)``, which gives what `Drafter.propose` gives: a `HostTree` for each row.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from ..tree.mask import WORD_BITS, ancestor_words, mask_from_parents
from .host import vector_of
from .protocols import Draft, Drafter


class HostTree(NamedTuple):
    """A row's tree.

    Attributes:
        ids: of the nodes, the pending token first.
        parents: of the nodes, topological; the root's is −1.
    """

    ids: list[int]
    parents: list[int]


class HostDrafter(Drafter, Protocol):
    """A drafter that can draft in lists."""

    def drafts_on_host(self, pending: Tensor) -> bool:
        """Say whether `trees` is the way to draft below these tokens."""
        ...

    def trees(self, pending: Tensor) -> list[HostTree]:
        """Draft below the pending tokens."""
        ...


def drafts_on_host(drafter: Drafter, pending: Tensor) -> TypeGuard[HostDrafter]:
    """Say whether a drafter of any kind drafts in lists here."""
    return hasattr(drafter, "drafts_on_host") and drafter.drafts_on_host(pending)


def graft_tree(trunk: HostTree, branch: HostTree, max_nodes: int) -> HostTree:
    """Put the nodes of a tree into another, each below the node that its parent became; see `merged.graft`."""
    ids, parents = list(trunk.ids), list(trunk.parents)
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(ids)):
        children.setdefault((parents[node], ids[node]), node)
    # Where each node of the branch is in the merged tree; one that found no room is nowhere, as are those below.
    places = {0: 0}
    for node in range(1, len(branch.ids)):
        parent = places.get(branch.parents[node])
        if parent is None:
            continue
        place = children.setdefault((parent, branch.ids[node]), len(ids))
        if place == max_nodes:
            continue
        places[node] = place
        if place == len(ids):
            ids.append(branch.ids[node])
            parents.append(parent)
    return HostTree(ids, parents)


def draft_of(trees: Sequence[HostTree], device: torch.device) -> Draft:
    """Return the draft of at least one tree, as wide as the widest; what is behind a smaller one hangs on its root."""
    sizes = [len(tree.ids) for tree in trees]
    width = max(sizes)
    padding = [[0] * (width - size) for size in sizes]
    all_parents = [tree.parents + more for tree, more in zip(trees, padding, strict=True)]
    all_depths = [_depths(parents) for parents in all_parents]
    ids = [tree.ids + more for tree, more in zip(trees, padding, strict=True)]

    def table(code: str, rows: Iterable[Iterable[int]], *shape: int) -> Tensor:
        return vector_of(chain.from_iterable(rows), code, device).view(len(trees), width, *shape)

    parents, tokens = table("i", all_parents), table("q", ids)
    is_word = width <= WORD_BITS
    mask = table("q", map(ancestor_words, all_parents), 1) if is_word else mask_from_parents(parents)
    depths = table("i", all_depths)
    used = None if min(sizes) == width else vector_of(sizes, "i", device)
    return Draft(tokens, parents, mask, depths, max(map(max, all_depths)), num_nodes=used)


def trees_of(draft: Draft) -> list[HostTree]:
    """Return the trees of a draft, read from its device."""
    batch, width = draft.ids.shape
    sizes = [width] * batch if draft.num_nodes is None else draft.num_nodes.tolist()
    rows = zip(draft.ids.tolist(), draft.parents.expand(batch, -1).tolist(), sizes, strict=True)
    return [HostTree(ids[:size], parents[:size]) for ids, parents, size in rows]


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths
