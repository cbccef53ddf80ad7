"""Verify a tree whose logits still have to be processed, and process only those that decide something."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._validate import values_readable
from ..types import Verification
from .acceptance import Acceptance, GreedyAcceptance, RejectionAcceptance
from .host import on_host, vector_of
from .protocols import Draft

ProcessNodes = Callable[[Tensor, Tensor], Tensor]


def verify_processed(
    acceptance: Acceptance,
    draft: Draft,
    target_logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    process: ProcessNodes,
    active: Tensor,
) -> tuple[Verification, Tensor]:
    """Decide as ``acceptance(draft, processed logits, …)`` would, bit for bit.

    Greedy and rejection verification walk down from the root: what happens at a node depends on that node's logits and
    on its children. So the walk goes one level at a time, and only the nodes it stands on are processed: at most
    ``max_depth + 1`` of each row instead of all T. Sorting 64 rows of a large vocabulary for top-p would cost more than
    the model. Other rules look at many nodes; for them all are processed.

    Args:
        acceptance, draft, target_logits, temperature, uniforms: as in `Acceptance`.
        process: ``(logits (B, V), nodes (B,) int64) → (B, V)``, processes the logits after one node of each row; where
            a node is −1 nothing is needed and the result is not read.
        active: ``(B,) bool``; nothing is processed for the other rows, and what is returned for them means nothing.

    Returns:
        The verification, and the processed logits ``(B, N+1, V)`` from which its output ids were chosen, one for each;
        behind the last of them they mean nothing.
    """
    if not _decides_node_by_node(acceptance):
        nodes = torch.arange(draft.ids.shape[1], device=draft.ids.device)[:, None]
        nodes = torch.where(active, nodes, -1)
        processed = torch.stack([process(target_logits[:, i], nodes[i]) for i in range(len(nodes))], dim=1)
        verification = acceptance(draft, processed, temperature, uniforms)
        return verification, along_path(processed, verification)
    return _walk(acceptance, draft, target_logits, temperature, uniforms, process, active)


def along_path(values: Tensor, verification: Verification) -> Tensor:
    """Gather ``values (B, T, …)`` at the root and the accepted nodes: ``(B, N+1, …)``, the root's again as padding."""
    nodes = F.pad(verification.accepted, (1, 0)).clamp_min(0).long()
    return values[torch.arange(len(nodes), device=nodes.device)[:, None], nodes]


def at_last_node(values: Tensor, verification: Verification) -> Tensor:
    """Take from ``values (B, T, …)`` what belongs to each row's last accepted node, the root if there is none."""
    _, num_accepted, accepted = verification
    if values_readable(num_accepted, accepted):
        rows = zip(*on_host(accepted, num_accepted), strict=True)
        nodes = [path[n - 1] if n else 0 for path, n in rows]
        if len(set(nodes)) == 1:  # always so for a row alone
            return values[:, nodes[0]]
        places = (row * values.shape[1] + node for row, node in enumerate(nodes))
        return values.flatten(0, 1).index_select(0, vector_of(places, "q", values.device))
    path = F.pad(accepted, (1, 0))
    last = path.gather(1, num_accepted[:, None].long())[:, 0].long()
    return values[torch.arange(len(last), device=values.device), last]


def _walk(
    acceptance: Acceptance,
    draft: Draft,
    target_logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    process: ProcessNodes,
    walking: Tensor,
) -> tuple[Verification, Tensor]:
    batch = torch.arange(len(draft.ids), device=draft.ids.device)
    node = torch.zeros_like(batch)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    while len(levels) <= draft.max_depth and not (values_readable(walking) and levels and not walking.any()):
        logits = process(target_logits[batch, node], torch.where(walking, node, -1))
        star = _children_only(draft, node)
        step = acceptance(star, logits[:, None].expand(-1, draft.ids.shape[1], -1), temperature, uniforms)
        token = torch.where(walking, step.output_ids[:, 0], -1)
        walking = walking & (step.num_accepted > 0)
        child = step.accepted[:, 0].long() if step.accepted.shape[1] else torch.full_like(node, -1)
        node = torch.where(walking, child, node)
        levels.append((token, torch.where(walking, node, -1), logits))
    tokens, accepted, logits = (torch.stack(parts, dim=1) for parts in zip(*levels, strict=True))
    return _assemble(tokens, accepted, draft.max_depth), logits


def _assemble(tokens: Tensor, accepted: Tensor, max_depth: int) -> Verification:
    """Lay out the levels as the ops do: a row that could not be judged at any of them holds only −1."""
    num_accepted = (accepted >= 0).sum(1, dtype=torch.int32)
    unreadable = tokens.gather(1, num_accepted[:, None].long()) < 0
    missing = max_depth + 1 - tokens.shape[1]
    output_ids = F.pad(tokens, (0, missing), value=-1).masked_fill(unreadable, -1)
    path = F.pad(accepted, (0, missing), value=-1)[:, :max_depth].masked_fill(unreadable, -1)
    return Verification(output_ids, num_accepted.masked_fill(unreadable[:, 0], 0), path.to(torch.int32))


def _children_only(draft: Draft, node: Tensor) -> Draft:
    """Return the draft in which each row's ``node`` is the root and only its children are left, under their own ids."""
    is_child = draft.parents == node[:, None]
    parents = torch.zeros_like(draft.parents[:1])
    parents[:, 0] = -1
    logits = draft.logits
    if logits is not None:
        logits = logits[torch.arange(len(node), device=node.device), node][:, None].expand_as(logits)
    ids = torch.where(is_child, draft.ids, -1)
    return draft._replace(ids=ids, parents=parents, max_depth=min(draft.max_depth, 1), logits=logits)


def _decides_node_by_node(acceptance: Acceptance) -> bool:
    if isinstance(acceptance, RejectionAcceptance):
        return not acceptance.block
    return isinstance(acceptance, GreedyAcceptance)
