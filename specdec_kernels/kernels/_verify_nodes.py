"""Drafted nodes: what the rules need to know of each before they walk, and which of them a batch row has judged."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._verify_rows import best_ids, exp2, scaled_tiles


class Inputs(NamedTuple):
    """Pointers of a call as the launcher passes them."""

    ids_ptr: Any
    parents_ptr: Any  # None: a chain, whose ids begin at node 1
    lengths_ptr: Any
    temperature_ptr: Any  # None: every row is greedy
    uniforms_ptr: Any


class Drafts(NamedTuple):
    """The drafts of one batch row. Its ids, parents and uniforms begin at these offsets; ids at node 0, even of chains.

    Whatever may hold None is built in a kernel's own body: Triton before 3.7 cannot return None from a function.
    """

    inputs: Any
    first_id: Any
    first_parent: Any
    first_uniform: Any
    stride_ids: Any
    stride_parents: Any
    stride_uniforms: Any
    in_use: Any  # nodes, with the root
    greedy: Any


class Nodes(NamedTuple):
    """Facts of each node, ``(B, T)`` in memory: written by `prepare_nodes`."""

    up_ptr: Any  # int32, the parent; -1 for the root and for what is no node of the tree
    p_ptr: Any  # fp64, probability of its token after its parent; with a threshold, 1 if above it, else 0
    q_ptr: Any  # fp64, the same for the draft's law; None without one
    # NaN in either: the row cannot be judged


class VocabMap(NamedTuple):
    """Columns of the draft logits by the target's id: ``columns[starts[x] : starts[x + 1]]``; None: the same ids."""

    starts_ptr: Any
    columns_ptr: Any


@triton.jit
def batch_row(inputs, num_nodes, stride_lengths, stride_temperature, batch):
    """Return of a batch row the nodes in use, whether it is greedy, and log2(e) / temperature."""
    in_use = num_nodes
    if inputs.lengths_ptr is not None:
        if inputs.parents_ptr is None:
            in_use = tl.minimum(num_nodes - 1, tl.load(inputs.lengths_ptr + batch * stride_lengths)) + 1
        else:
            in_use = tl.minimum(num_nodes, tl.load(inputs.lengths_ptr + batch * stride_lengths))
    scale = tl.full([], 1.4426950408889634, tl.float64)
    greedy = scale > 0
    if inputs.temperature_ptr is not None:
        temperature = tl.load(inputs.temperature_ptr + batch * stride_temperature)
        greedy = temperature < 1e-5
        scale = scale / tl.where(greedy, 1.0, temperature).to(tl.float64)
    return in_use, greedy, scale


@triton.jit
def uniform(drafts, node):
    """Return the uniform that decides a node; 0 in greedy rows, where a probability is 0 or 1."""
    u = tl.full([], 0.0, tl.float64)
    if drafts.inputs.uniforms_ptr is not None:
        if not drafts.greedy:
            at = drafts.first_uniform + node.to(tl.int64) * drafts.stride_uniforms
            u = tl.load(drafts.inputs.uniforms_ptr + at).to(tl.float64)
    return u


@triton.jit
def load_ids(drafts, nodes, ok):
    at = drafts.first_id + tl.cast(nodes, tl.int64) * drafts.stride_ids
    return tl.load(drafts.inputs.ids_ptr + at, mask=ok, other=-1)


@triton.jit
def load_parents(drafts, nodes, ok):
    """Return the parents of nodes, -1 where there is none."""
    if drafts.inputs.parents_ptr is None:
        return tl.where(ok, nodes - 1, -1)
    else:
        at = drafts.first_parent + nodes.to(tl.int64) * drafts.stride_parents
        parents = tl.load(drafts.inputs.parents_ptr + at, mask=ok, other=-1)
        return tl.where((parents >= 0) & (parents < nodes), parents, -1)


@triton.jit
def has_child(drafts, row, BLOCK_NODES: tl.constexpr):
    """Say whether any node in use has this parent."""
    if drafts.inputs.parents_ptr is None:
        return row + 1 < drafts.in_use
    else:
        found = tl.full([], 0, tl.int32)
        for base in range(0, drafts.in_use, BLOCK_NODES):
            nodes = base + tl.arange(0, BLOCK_NODES)
            parents = load_parents(drafts, nodes, (nodes > row) & (nodes < drafts.in_use))
            found += tl.sum((parents == row).to(tl.int32), 0)
        return found > 0


@triton.jit
def mapped_weights(ptr, ids, ok, peak, scale, vocab_map):
    """Return the weights of target ids in rows of draft logits; several columns of one id add up."""
    if vocab_map.starts_ptr is None:
        x = tl.load(ptr + ids, mask=ok, other=float("-inf"))
        return exp2((x.to(tl.float64) - peak) * scale)
    else:
        start = tl.load(vocab_map.starts_ptr + ids, mask=ok, other=0)
        count = tl.load(vocab_map.starts_ptr + ids + 1, mask=ok, other=0) - start
        weights = tl.zeros_like(count).to(tl.float64)
        for i in range(tl.max(count, 0)):
            column = tl.load(vocab_map.columns_ptr + start + i, mask=i < count, other=0)
            x = tl.load(ptr + column, mask=i < count, other=float("-inf"))
            weights += exp2((x.to(tl.float64) - peak) * scale)
        return weights


@triton.jit
def judged_by_target(target, ids, parents, ok, tiles, greedy, epsilon, delta):
    """Return p of nodes; with thresholds, whether p lies above ``min(epsilon, delta * exp(-entropy))``."""
    if greedy:
        best = best_ids(target, parents, ok, tiles)
        p = tl.where(best < 0, float("nan"), (ids == best).to(tl.float64))
        spread = tl.zeros_like(p) + 1.0
    else:
        peak, inverse, weights, shift = scaled_tiles(target, parents, ok, tiles)
        x = tl.load(target.ptr + parents.to(tl.int64) * target.stride + ids, mask=ok, other=float("-inf"))
        p = exp2((x.to(tl.float64) - peak) * target.scale) * inverse
        spread = tl.zeros_like(p) + 1.0
        if target.stats.logs_ptr is not None:
            at = target.first + parents.to(tl.int64)[:, None] * target.num_tiles + tiles[None, :]
            logs = tl.load(target.stats.logs_ptr + at, mask=weights > 0, other=0.0)
            logs = tl.where(weights > 0, exp2(shift) * logs + shift * weights, 0.0)
            spread = exp2(tl.minimum(tl.sum(logs, 1) * inverse, 0.0)) * inverse
    if target.stats.logs_ptr is not None:
        p = tl.where(p == p, (p > tl.minimum(delta * spread, epsilon)).to(tl.float64), float("nan"))
    return p


@triton.jit
def prepare_nodes(
    drafts, nodes, target, draft, vocab_map, epsilon, delta, BLOCK_NODES: tl.constexpr, BLOCK_TILES: tl.constexpr
):
    """Write `Nodes`, and let every thread of the program see them."""
    tiles = tl.arange(0, BLOCK_TILES)
    for base in range(0, drafts.in_use, BLOCK_NODES):
        at = base + tl.arange(0, BLOCK_NODES)
        ok = (at >= 1) & (at < drafts.in_use)
        ids = load_ids(drafts, at, ok)
        parents = load_parents(drafts, at, ok & (ids >= 0) & (ids < target.size))
        ok = parents >= 0
        p = judged_by_target(target, ids, parents, ok, tiles, drafts.greedy, epsilon, delta)
        tl.store(nodes.up_ptr + at, parents, mask=at < drafts.in_use)
        tl.store(nodes.p_ptr + at, tl.where(ok, p, 0.0), mask=at < drafts.in_use)
        if nodes.q_ptr is not None:
            q = tl.zeros_like(p)
            if not drafts.greedy:
                peak, inverse, _, _ = scaled_tiles(draft, parents, ok, tiles)
                ptr = draft.ptr + parents.to(tl.int64) * draft.stride
                q = mapped_weights(ptr, ids, ok, peak, draft.scale, vocab_map) * inverse
            tl.store(nodes.q_ptr + at, tl.where(ok, q, 0.0), mask=at < drafts.in_use)
    tl.debug_barrier()


@triton.jit
def seen_before(drafts, nodes, parent, last, token, BLOCK_NODES: tl.constexpr):
    """Say whether a child of ``parent`` up to node ``last`` has the token."""
    found = tl.full([], 0, tl.int32)
    for base in range(0, last + 1, BLOCK_NODES):
        at = base + tl.arange(0, BLOCK_NODES)
        up = tl.load(nodes.up_ptr + at, mask=(at >= 1) & (at <= last), other=-1)
        ids = load_ids(drafts, at, up == parent)
        found += tl.sum(((up == parent) & (ids == token)).to(tl.int32), 0)
    return found > 0
