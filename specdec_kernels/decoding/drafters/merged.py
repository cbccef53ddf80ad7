"""Several drafters, one tree: what one proposes is grafted into the tree of another."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._validate import check_range, values_readable
from ...tree.mask import HOST_NODES, depths_from_mask, mask_from_parents
from ...types import Verification
from ..drafting import DraftContext, first_nodes
from ..host_trees import HostDrafter, HostTree, draft_of, drafts_on_host, graft_tree, trees_of
from ..protocols import Draft, Drafter, TargetOutput


class MergedDrafter:
    """Merge the drafts of several drafters into one tree, which is verified in one pass.

    Where two drafts begin alike the tree has one branch, which forks where they part:

        trunk    root ─ a ─ b          branch   root ─ a ─ c ─ d          merged   root ─ a ┬ b
                      └ e                                                        │        └ c ─ d
                                                                                 └ e

    So an n-gram drafter, which costs nothing, extends Medusa's tree where the text repeats itself. The nodes of the
    first drafter come first and keep their numbers; those of the others follow while there is room.

    Exact for every rule of acceptance. When the first drafter *draws* its tokens (a draft model in a sampled run),
    nothing is grafted beside a drawn token, because siblings must come from one distribution: then the others only
    extend its paths beyond their ends.

    Args:
        first: whose tree is the trunk. One that gives `Draft.hidden` also has ``run_nodes``, as `KangarooDrafter` has,
            and must be the first.
        others: whose drafts are grafted into it, in this order. They must not draw: `Draft.logits` None.
        max_nodes: of the merged tree, root included; at least the first drafter's. All nodes of all drafters when None.

    Raises:
        ValueError: no ``others``, one of them has ``run_nodes``, ``max_nodes`` out of range, or at `propose`: another
            drafter draws its tokens.

    Example:
        >>> heads = MedusaHeads(num_heads=2, num_layers=1, hidden_size=8, vocab_size=32)
        >>> medusa = MedusaDrafter(heads, DraftTree.from_choices([[0], [1], [0, 0]]), torch.randn(32, 8))
        >>> MergedDrafter(medusa, NGramDrafter(max_drafts=8), max_nodes=10).max_nodes
        10
    """

    # As the first drafter's, if that has it.
    run_nodes: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]

    def __init__(self, first: Drafter, *others: Drafter, max_nodes: int | None = None):
        if not others:
            raise ValueError("MergedDrafter: there must be at least two drafters, got one")
        for drafter in others:
            if hasattr(drafter, "run_nodes"):
                name = type(drafter).__name__
                raise ValueError(f"MergedDrafter: {name} runs layers for the verification; it must be the first one")
        if hasattr(first, "run_nodes"):
            self.run_nodes = first.run_nodes
        everything = first.max_nodes + sum(drafter.max_nodes - 1 for drafter in others)
        if max_nodes is not None:
            check_range("MergedDrafter", "max_nodes", max_nodes, first.max_nodes, 1024)
        self.drafters = (first, *others)
        self._max_nodes = everything if max_nodes is None else min(everything, max_nodes)
        self._context: DraftContext | None = None

    @property
    def max_nodes(self) -> int:
        """The budget of the merged tree."""
        return self._max_nodes

    def bind(self, context: DraftContext) -> None:
        """Hand the run on to the drafters that want it."""
        self._context = context
        for drafter in self.drafters:
            if hasattr(drafter, "bind"):
                drafter.bind(context)

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Start a batch with every drafter."""
        for drafter in self.drafters:
            drafter.begin(prompt_ids, prompt_len, output)

    @torch.no_grad()
    def propose(self, pending: Tensor) -> Draft:
        """Return the merged tree below the pending tokens ``(B,) int64``."""
        if self.drafts_on_host(pending):
            return draft_of(self.trees(pending), pending.device)
        first, *others = self.drafters
        limit = self._limit
        branches: Iterable[Draft] = (drafter.propose(pending) for drafter in others)
        if hasattr(self, "run_nodes"):
            # The rows that the first one caches in this step are to stay: others that run the target write there, too.
            branches = list(branches)
        # Whether it stays a chain depends on what was drawn: a rule chosen by that would not be exact.
        trunk = merged = first_nodes(first.propose(pending), limit)._replace(is_chain=False)
        for branch in () if _is_full(trunk, limit) else branches:
            merged = graft(merged, branch, limit)
        if trunk.hidden is None or merged is trunk:
            return merged
        # Layers that the first drafter has run for its nodes are run for the others, too.
        start = trunk.ids.shape[1] if trunk.num_nodes is None else int(trunk.num_nodes.min())
        hidden, new_ids = trunk.hidden[:, :start], merged.ids[:, start:]
        if new_ids.shape[1]:
            new, _ = self.run_nodes(new_ids, merged.tree_mask, merged.depths[:, start:], start)
            hidden = torch.cat([hidden, new], dim=1)
        return merged._replace(hidden=hidden)

    def drafts_on_host(self, pending: Tensor) -> bool:
        """Say whether all drafters do."""
        return all(drafts_on_host(drafter, pending) for drafter in self.drafters)

    def trees(self, pending: Tensor) -> list[HostTree]:
        """Do what `propose` does, in lists, where all drafters can."""
        first, *others = cast(tuple[HostDrafter, ...], self.drafters)
        limit = self._limit
        trees = [HostTree(tree.ids[:limit], tree.parents[:limit]) for tree in first.trees(pending)]
        for drafter in others:
            if all(len(tree.ids) == limit for tree in trees):
                break
            pairs = zip(trees, drafter.trees(pending), strict=True)
            trees = [graft_tree(tree, branch, limit) for tree, branch in pairs]
        return trees

    @property
    def _limit(self) -> int:
        """Nodes of the present draft."""
        return self._max_nodes if self._context is None else min(self._max_nodes, self._context.max_nodes)

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Tell every drafter what became of the merged tree."""
        for drafter in self.drafters:
            drafter.observe(draft, output, verification, active)


def _is_full(draft: Draft, max_nodes: int) -> bool:
    """Say whether no row has room left. A row with few nodes has, however wide the longest one makes the draft."""
    if draft.ids.shape[1] < max_nodes:
        return False
    used = draft.num_nodes
    return used is None or max_nodes == 1 or (values_readable(used) and bool((used >= max_nodes).all()))


def graft(trunk: Draft, branch: Draft, max_nodes: int) -> Draft:
    """Put the nodes of one draft into another, each below the node that its parent became.

    A node that the parent already has is the same node. The others are appended, while a row has fewer than
    ``max_nodes``. On a GPU nothing waits for the device.

    Args:
        trunk: keeps its nodes and their numbers; it may have drawn tokens.
        branch: chosen deterministically, on the same pending tokens.
        max_nodes: of each row, at least the trunk's.

    Returns:
        The merged draft; on the CPU as wide as its longest row, elsewhere as all might need.

    Raises:
        ValueError: ``branch`` has logits.
    """
    if branch.logits is not None:
        raise ValueError("MergedDrafter: only the first drafter may draw its tokens; got logits from another one")
    batch, size = trunk.ids.shape
    if branch.ids.shape[1] == 1:
        return trunk
    width = min(max_nodes, size + branch.ids.shape[1] - 1)
    if trunk.logits is None and 0 < batch * width <= HOST_NODES and values_readable(trunk.ids, branch.ids):
        pairs = zip(trees_of(trunk), trees_of(branch), strict=True)
        merged = draft_of([graft_tree(tree, other, width) for tree, other in pairs], trunk.ids.device)
        return merged._replace(num_layers_run=trunk.num_layers_run, hidden=trunk.hidden)
    ids, parents, used = _grow(trunk, branch, width)
    width = max(int(used.max()), 1) if batch and values_readable(used) else ids.shape[1]
    ids, parents = ids[:, :width], parents[:, :width]
    mask = mask_from_parents(parents)
    merged = trunk._replace(
        ids=ids,
        parents=parents.to(torch.int32),
        tree_mask=mask,
        depths=depths_from_mask(mask),
        max_depth=min(max(trunk.max_depth, branch.max_depth), width - 1),
        num_nodes=used[:, 0].to(torch.int32),
    )
    return merged if trunk.logits is None else merged._replace(logits=_logits(trunk, parents, used))


def _grow(trunk: Draft, branch: Draft, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `graft_tree` does without waiting for a device.

    Returns:
        Ids and parents ``(B, width)`` and the nodes in use ``(B, 1)``.
    """
    batch, size = trunk.ids.shape
    ids = F.pad(trunk.ids, (0, width - size))
    parents = F.pad(trunk.parents.expand(batch, -1).long(), (0, width - size))
    trunk_used, branch_used = _num_nodes(trunk), _num_nodes(branch)
    used = trunk_used
    slots = torch.arange(width, device=ids.device)
    branch_parents = branch.parents.expand(batch, -1).long()
    # Where each node of the branch is in the merged tree, −1: nowhere.
    places = torch.zeros_like(branch.ids)
    for node in range(1, branch.ids.shape[1]):
        parent, token = places.gather(1, branch_parents[:, node, None]), branch.ids[:, node, None]
        is_child = (parents == parent) & (slots > 0) & (slots < used)
        is_same = is_child & (ids == token)
        is_there = is_same.any(1, keepdim=True)
        is_wanted = (parent >= 0) & (node < branch_used)
        is_new = is_wanted & ~is_there & (used < width)
        if trunk.logits is not None:
            is_new = is_new & ~(is_child & (slots < trunk_used)).any(1, keepdim=True)
        place = torch.where(is_there, is_same.int().argmax(1, keepdim=True), used)
        places[:, node] = torch.where(is_wanted & (is_there | is_new), place, -1)[:, 0]
        is_here = is_new & (slots == used)
        ids, parents = torch.where(is_here, token, ids), torch.where(is_here, parent, parents)
        used = used + is_new.long()
    return ids, parents, used


def _num_nodes(draft: Draft) -> Tensor:
    """``(B, 1) int64``: the nodes in use."""
    if draft.num_nodes is None:
        return torch.full_like(draft.ids[:, :1], draft.ids.shape[1])
    return draft.num_nodes.long()[:, None]


def _logits(trunk: Draft, parents: Tensor, used: Tensor) -> Tensor:
    """Give the parents of grafted nodes a distribution under which these were chosen, not drawn.

    Any point mass does: a draft that had no mass, or all of it, is judged as a choice.
    """
    assert trunk.logits is not None
    logits = F.pad(trunk.logits, (0, 0, 0, parents.shape[1] - trunk.logits.shape[1]))
    slots = torch.arange(parents.shape[1], device=parents.device)
    is_grafted = (slots >= _num_nodes(trunk)) & (slots < used)
    is_parent = ((parents[:, :, None] == slots) & is_grafted[:, :, None]).any(1)
    point = torch.full_like(logits[0, 0], -torch.inf)
    point[0] = 0
    return torch.where(is_parent[:, :, None], point, logits)
