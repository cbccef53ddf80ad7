"""Verification in plain torch: the law every kernel is held to.

All rules share one shape. ``p`` is what the target wants after the current node, ``law`` the distribution that one
draft came from. A draft ``x`` is accepted iff ``u · law(x) < p(x)``; otherwise ``p`` becomes the residual
``norm(max(p − law, 0))``, against which the next sibling is judged. What ``p`` is in the end gives the final token.
``docs/verification.md`` proves that the emitted tokens follow the target exactly.

Probabilities are float64 and exist only for the node a row stands on, ``(B, V)`` at a time. The loops run over nodes
and never over data, so all this can be captured in a CUDA graph; on the CPU, where looking at a value is free, work
that no row of the batch needs is left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._verify_philox import LOW_WORD, philox_4x32
from ._verify_probs import draft_probs, drafted_from, draw, greedy_rows, needed, residual, target_probs, without

Results = tuple[Tensor, Tensor, Tensor]


def verify_tree_ref(
    ids: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    uniforms: Tensor,
    num_nodes: Tensor | None = None,
    *,
    with_replacement: bool = False,
    draft_vocab_map: Tensor | None = None,
) -> Results:
    """Accept along one path of a tree: children of the current node in index order, each once (see `verify_tree`).

    Parents come before their children, so one pass over the nodes meets, after each accepted node, all its children.
    """
    vocab = target_logits.shape[-1]
    usable = _usable_nodes(ids, num_nodes, vocab)
    tokens = ids.clamp(0, vocab - 1)
    uniforms = _decisions(uniforms, temperature)

    current = torch.zeros_like(ids[:, 0])
    children = usable & (parents == 0)
    p = target_probs(target_logits, current, temperature)
    q = None if draft_logits is None else draft_probs(draft_logits, current, temperature, vocab, draft_vocab_map)
    unreadable = p[:, 0].isnan()
    taken = torch.zeros_like(usable)
    for node in range(1, ids.shape[1]):
        judged = children[:, node]
        if not needed(judged):
            continue
        x = tokens[:, node, None]
        law = drafted_from(q, p, x)
        law_x = law.gather(1, x)[:, 0]
        accepted = judged & (uniforms[:, node] * law_x < p.gather(1, x)[:, 0])
        rejected = judged & ~accepted
        unreadable = unreadable | (judged & law_x.isnan())

        if needed(rejected):
            p = residual(p, law, rejected)
            if q is not None and not with_replacement:
                q = without(q, x, rejected)
        if needed(accepted):
            taken[:, node] = accepted
            current = torch.where(accepted, node, current)
            children = usable & (parents == current[:, None])
            p = torch.where(accepted[:, None], target_probs(target_logits, current, temperature), p)
            unreadable = unreadable | p[:, 0].isnan()
            if draft_logits is not None and q is not None and needed(accepted & children.any(1)):
                next_q = draft_probs(draft_logits, current, temperature, vocab, draft_vocab_map)
                q = torch.where(accepted[:, None], next_q, q)
    return _results(taken, ids, draw(p, uniforms[:, 0]), unreadable)


def verify_chain_ref(
    draft_ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    uniforms: Tensor,
    draft_len: Tensor | None = None,
    *,
    block: bool = False,
    draft_vocab_map: Tensor | None = None,
) -> Results:
    """Verify a chain: the tree whose node i is the child of node i − 1, or as a whole block (see `verify_chain`)."""
    num_drafts = draft_ids.shape[1]
    # The root's id is never read; it only makes node i column i.
    ids = F.pad(draft_ids, (1, 0))
    num_nodes = None if draft_len is None else draft_len + 1
    if num_drafts == 0:
        draft_logits = None
    if block:
        return _verify_block(ids, target_logits, draft_logits, temperature, uniforms, num_nodes, draft_vocab_map)
    parents = torch.arange(-1, num_drafts, dtype=torch.int32, device=ids.device)[None]
    return verify_tree_ref(
        ids, parents, target_logits, draft_logits, temperature, uniforms, num_nodes, draft_vocab_map=draft_vocab_map
    )


def _verify_block(
    ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    uniforms: Tensor,
    num_nodes: Tensor | None,
    draft_vocab_map: Tensor | None,
) -> Results:
    """Keep the longest prefix whose own test passes; an early failure does not end the search.

    ``weight`` is min(1, p/q) chained over the prefix: how much of it the target wants. Sun et al. 2024, algorithm 2.
    """
    vocab = target_logits.shape[-1]
    usable = _usable_nodes(ids, num_nodes, vocab)
    # The chain ends before the first node that is not in use.
    chain_len = usable[:, 1:].long().cumprod(1).sum(1)
    tokens = ids.clamp(0, vocab - 1)
    uniforms = _decisions(uniforms, temperature)

    weight = torch.ones_like(uniforms[:, 0])
    num_accepted = torch.zeros_like(chain_len)
    unreadable = torch.zeros_like(usable[:, 0])
    final = weight.new_zeros(ids.shape[0], vocab)
    for node in range(ids.shape[1]):
        inside = chain_len >= node
        is_last = chain_len == node
        if not needed(inside):
            break
        at = torch.full_like(chain_len, node)
        p = target_probs(target_logits, at, temperature)
        x = tokens[:, min(node + 1, ids.shape[1] - 1), None]
        q = None if draft_logits is None else draft_probs(draft_logits, at, temperature, vocab, draft_vocab_map)
        law = drafted_from(q, p, x)
        law_x = law.gather(1, x)[:, 0]
        unreadable = unreadable | (inside & p[:, 0].isnan()) | (inside & ~is_last & law_x.isnan())

        rest = (weight[:, None] * p - law).clamp_(min=0)
        mass = rest.sum(1)
        # 0/0: target and draft agree on what follows a prefix of weight 1, and then the next prefix passes as well.
        share = torch.where(mass + 1 - weight > 0, mass / (mass + 1 - weight), 1.0)
        passes = inside if node == 0 else inside & (uniforms[:, node] < torch.where(is_last, weight, share))
        num_accepted = torch.where(passes, node, num_accepted)
        leftover = torch.where((is_last | (mass == 0))[:, None], p, rest)
        final = torch.where(passes[:, None], leftover, final)
        weight = (weight * p.gather(1, x)[:, 0] / law_x).clamp(max=1)
    nodes = torch.arange(ids.shape[1], device=ids.device)
    taken = (nodes >= 1) & (nodes <= num_accepted[:, None])
    return _results(taken, ids, draw(final, uniforms[:, 0]), unreadable)


def verify_tree_greedy_ref(
    ids: Tensor, parents: Tensor, target_logits: Tensor, num_nodes: Tensor | None = None
) -> Results:
    """Follow the target's argmax (see `verify_tree_greedy`): the sampled rule at temperature 0."""
    temperature = torch.zeros(ids.shape[0], dtype=torch.float32, device=ids.device)
    uniforms = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    return verify_tree_ref(ids, parents, target_logits, None, temperature, uniforms, num_nodes)


def verify_tree_typical_ref(
    ids: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    num_nodes: Tensor | None = None,
    *,
    epsilon: float,
    delta: float,
) -> Results:
    """Accept what is not improbable for the target, and take the longest such path (see `verify_tree_typical`)."""
    vocab = target_logits.shape[-1]
    # Unchecked parents on a device: one that does not come first is nobody's.
    usable = _usable_nodes(ids, num_nodes, vocab) & (parents < torch.arange(ids.shape[1], device=ids.device))
    tokens = ids.clamp(0, vocab - 1)

    # Depth of every node that is reached through accepted nodes only, −1 for the others.
    depth = torch.full_like(ids, -1)
    depth[:, 0] = 0
    unreadable = torch.zeros_like(usable[:, 0])
    for node in range(ids.shape[1] - 1):
        children = usable & (parents == node) & (depth[:, node, None] >= 0)
        if not needed(children):
            continue
        p = target_probs(target_logits, torch.full_like(ids[:, 0], node), temperature)
        unreadable = unreadable | (children.any(1) & p[:, 0].isnan())
        threshold = (delta * torch.exp(-torch.special.entr(p).sum(1))).clamp(max=epsilon)
        typical = children & (p.gather(1, tokens) > threshold[:, None])
        depth = torch.where(typical, depth[:, node, None] + 1, depth)

    last = depth.argmax(1)
    p = target_probs(target_logits, last, temperature)
    final = draw(p, _decisions(uniforms, temperature)[:, 0])
    return _results(_path_to(last, parents), ids, final, unreadable | p[:, 0].isnan())


def philox_uniforms_ref(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Return the first ``count`` draws of each (seed, position) as fp32 in (0, 1) (see `philox_uniforms`)."""
    num_blocks = -(-count // 4)
    block = torch.arange(num_blocks, device=seed.device).expand(seed.shape[0], num_blocks)
    seed, position = seed[:, None].expand_as(block), position[:, None].expand_as(block)
    counter = (block, torch.zeros_like(block), position & LOW_WORD, position >> 32 & LOW_WORD)
    words = torch.stack(philox_4x32(counter, (seed & LOW_WORD, seed >> 32 & LOW_WORD)), dim=-1)
    # 23 bits and a half step: exact in fp32, never 0 and never 1.
    return (((words >> 9) * 2 + 1).float() * 2.0**-24).flatten(1)[:, :count].contiguous()


def _usable_nodes(ids: Tensor, num_nodes: Tensor | None, vocab: int) -> Tensor:
    """Say which nodes can be judged, ``(B, T) bool``: not the root, in use, and with an id of the vocabulary."""
    nodes = torch.arange(ids.shape[1], device=ids.device)
    usable = (nodes >= 1) & (ids >= 0) & (ids < vocab)
    return usable if num_nodes is None else usable & (nodes < num_nodes[:, None])


def _decisions(uniforms: Tensor, temperature: Tensor) -> Tensor:
    """Return the uniforms in float64, 0 for greedy rows: with ``p`` one-hot, ``0 < p(x)`` is ``x == argmax``."""
    return uniforms.double().masked_fill(greedy_rows(temperature)[:, None], 0.0)


def _path_to(last: Tensor, parents: Tensor) -> Tensor:
    """Mark the nodes from below the root to ``last``, ``(B, T) bool``."""
    taken = torch.zeros(last.shape[0], parents.shape[1], dtype=torch.bool, device=last.device)
    for node in range(parents.shape[1] - 1, 0, -1):
        taken[:, node] = last == node
        last = torch.where(taken[:, node], parents[:, node], last)
    return taken


def _results(taken: Tensor, ids: Tensor, final: Tensor, unreadable: Tensor) -> Results:
    """Lay out a `Verification`. Node ids increase along a path, so sorting the taken nodes gives path order."""
    num_nodes = ids.shape[1]
    taken = taken & ~unreadable[:, None]
    nodes = torch.arange(num_nodes, device=ids.device)
    path = torch.where(taken, nodes, num_nodes).sort(1).values
    is_padding = path == num_nodes
    num_accepted = taken.sum(1)
    output_ids = ids.gather(1, path.clamp(max=num_nodes - 1)).masked_fill(is_padding, -1)
    output_ids = output_ids.scatter(1, num_accepted[:, None], final.masked_fill(unreadable, -1)[:, None])
    accepted = path.masked_fill(is_padding, -1)[:, : num_nodes - 1]
    return output_ids, num_accepted.int(), accepted.to(torch.int32).contiguous()
