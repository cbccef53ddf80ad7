"""The rules: which drafts of a batch row are accepted. ``docs/verification.md`` has the mathematics.

Every program of a batch row walks by itself, over facts that are in memory already; the result is the same for all.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._verify_nodes import load_ids, seen_before, uniform
from ._verify_rest import Rest, sum_tiles


class Output(NamedTuple):
    """Where the results of one batch row go; None where a program only wants to know them."""

    ids_ptr: Any
    count_ptr: Any
    accepted_ptr: Any


@triton.jit
def emit(output, drafts, node, position):
    tl.store(output.ids_ptr + position, load_ids(drafts, node, node >= 0))
    tl.store(output.accepted_ptr + position, node)


@triton.jit
def emit_chain(output, drafts, count, BLOCK_NODES: tl.constexpr):
    """Write the first nodes of a chain."""
    for base in range(0, count, BLOCK_NODES):
        at = base + tl.arange(0, BLOCK_NODES)
        tl.store(output.ids_ptr + at, load_ids(drafts, at + 1, at < count), mask=at < count)
        tl.store(output.accepted_ptr + at, at + 1, mask=at < count)


@triton.jit
def emit_path(output, drafts, nodes, node, count):
    """Write the path that ends at a node of depth ``count``."""
    for i in range(count):
        emit(output, drafts, node, count - 1 - i)
        node = tl.load(nodes.up_ptr + node)


@triton.jit
def walk(
    node,
    current,
    count,
    a,
    last,
    mass,
    norm,
    unreadable,
    drafts,
    nodes,
    output,
    HAS_MAP: tl.constexpr,
    WITH_REPLACEMENT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Judge nodes until all are, or a rejection asks for sums over the vocabulary (``event``).

    ``mass`` is the sum of rest at the current node, ``norm`` of q without the rejected ids. Without an event both are
    up to date.
    """
    event = node < 0
    a_before, last_before = a, last
    while (node < drafts.in_use) & (event == 0):
        if tl.load(nodes.up_ptr + node) == current:
            p = tl.load(nodes.p_ptr + node)
            is_gone = last < 0
            if last > 0:
                is_gone = seen_before(drafts, nodes, current, last, load_ids(drafts, node, node >= 0), BLOCK_NODES)
            law = tl.full([], 0.0, tl.float64)
            rest = p
            if nodes.q_ptr is not None:
                q = tl.load(nodes.q_ptr + node)
                unreadable = unreadable | (q != q)
                rest = tl.maximum(p - a * q, 0.0)
                law = q / norm if WITH_REPLACEMENT else tl.where(is_gone | (norm <= 0), 0.0, q / norm)
            rest = tl.where(is_gone, 0.0, rest)
            is_drawn = law > 0
            if uniform(drafts, node) * tl.where(is_drawn, law, 1.0) * mass < rest:
                if output is not None:
                    emit(output, drafts, node, count)
                count += 1
                current = node
                a, last = 0.0 * a, 0 * last
                mass, norm = 0.0 * mass + 1.0, 0.0 * norm + 1.0
            else:
                a_before, last_before = a, last
                last = node
                if is_drawn:
                    event = p == p
                    a += mass / norm
                else:
                    # Subtraction will do as long as it does not cancel.
                    event = (rest > 0) & ((a > 0) | (mass - rest < 1e-3 * mass))
                    if HAS_MAP and not WITH_REPLACEMENT:
                        event = event | (a == 0)  # q may have had columns for no id
                    mass = tl.where(event, mass, mass - rest)
        node += 1
    return node, current, count, a, last, mass, norm, unreadable, event, a_before, last_before


@triton.jit
def walk_chain(rest_ptr, target, drafts, nodes, output, BLOCK_TILES: tl.constexpr):
    """Walk to the end of a chain; as `walk_tree`. There is one rejection at most, and nothing is judged after it."""
    first, root, one = tl.full([], 1, tl.int32), tl.full([], 0, tl.int32), tl.full([], 1.0, tl.float64)
    _node, current, count, a, last, _mass, _norm, unreadable, _event, _a, _last = walk(
        first, root, root, 0 * one, root, one, one, one < 0, drafts, nodes, output, False, False, 1
    )
    if rest_ptr is not None:
        if a > 0:
            tiles = tl.arange(0, BLOCK_TILES)
            # Where rounding leaves nothing, p stays.
            if not (tl.sum(tl.load(rest_ptr + tiles, mask=tiles < target.num_tiles, other=0.0), 0) > 0):
                a, last = 0 * a, 0 * last
    return Rest(current, one, a, last, a > 0), count, unreadable


@triton.jit
def walk_tree(
    rest_ptr,
    left_ptr,
    target,
    draft,
    drafts,
    nodes,
    output,
    vocab_map,
    WITH_REPLACEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Walk to the end; return the last accepted node's `Rest`, the number accepted, and whether q is unreadable.

    The sums of the first event are at ``rest_ptr`` and ``left_ptr`` (None without drafts from a law); those of later
    ones are made here.
    """
    zero, one = tl.full([], 0.0, tl.float64), tl.full([], 1.0, tl.float64)
    node, current, count, last = tl.full([], 1, tl.int32), zero.to(tl.int32), zero.to(tl.int32), zero.to(tl.int32)
    a, mass, norm, unreadable = zero, one, one, zero > 0
    has_sums = zero == 0 if left_ptr is not None else zero > 0
    is_stale = zero > 0
    is_open = zero == 0
    tiles = tl.arange(0, BLOCK_TILES)
    while is_open:
        node, current, count, a, last, mass, norm, unreadable, event, a_before, last_before = walk(
            *(node, current, count, a, last, mass, norm, unreadable, drafts, nodes, output),
            *(vocab_map.starts_ptr is not None, WITH_REPLACEMENT, BLOCK_NODES),
        )
        is_open = event | (is_stale & (a > 0))
        if is_open:
            new_mass, new_norm = mass, norm
            if has_sums:
                if left_ptr is not None:
                    new_mass = tl.sum(tl.load(rest_ptr + tiles, mask=tiles < target.num_tiles, other=0.0), 0)
                    new_norm = tl.sum(tl.load(left_ptr + tiles, mask=tiles < target.num_tiles, other=0.0), 0)
            else:
                rest = Rest(current, one, a, last, (a > 0) | (vocab_map.starts_ptr is not None))
                new_mass, new_norm = sum_tiles(
                    *(0, target.num_tiles, rest_ptr, left_ptr, target, draft, drafts, nodes, vocab_map, rest),
                    *(BLOCK, BLOCK_NODES, BLOCK_TILES),
                )
                tl.debug_barrier()
            has_sums = zero > 0
            if left_ptr is not None and not WITH_REPLACEMENT:
                norm = tl.where((a > 0) | (vocab_map.starts_ptr is not None), new_norm, norm)
            # Where rounding leaves nothing, p stays as it was, and so do its sums.
            stays = event & ~(new_mass > 0)
            mass = tl.where(event & (new_mass > 0), new_mass, mass)
            a, last = tl.where(stays, a_before, a), tl.where(stays, last_before, last)
            is_stale = stays
    return Rest(current, one, a, last, a > 0), count, unreadable


@triton.jit
def block_weight(node, weight, p, q, u, mass):
    """Return whether the prefix up to ``node`` passes, and the weight of the next prefix. Sun et al. 2024."""
    remainder = mass + 1 - weight
    # 0/0: target and draft agree on what follows a prefix of weight 1.
    share = tl.where(remainder > 0, mass / tl.where(remainder > 0, remainder, 1.0), 1.0)
    return (node == 0) | (u < share), tl.minimum(weight * p / tl.where(q > 0, q, 1.0), 1.0)


@triton.jit
def load_node(nodes, node):
    """Return p and q of a node; 0 for q without a law."""
    q = tl.full([], 0.0, tl.float64)
    if nodes.q_ptr is not None:
        q = tl.load(nodes.q_ptr + node)
    return tl.load(nodes.p_ptr + node), q


@triton.jit
def weight_at(node, nodes):
    """Return the weight of the prefix up to ``node``, and whether the draft after it is judged by its law."""
    weight = tl.full([], 1.0, tl.float64)
    is_inside = tl.load(nodes.up_ptr + node + 1) >= 0
    for i in range(1, node + 1):
        is_inside = is_inside & (tl.load(nodes.up_ptr + i) >= 0)
        p, q = load_node(nodes, i)
        weight = tl.minimum(weight * p / tl.where(q > 0, q, 1.0), 1.0)
    _, q = load_node(nodes, node + 1)
    return weight, is_inside & (q > 0)


@triton.jit
def walk_block(rest_ptr, target, drafts, nodes, BLOCK_TILES: tl.constexpr):
    """Find the longest prefix that passes; return its `Rest`, its length, where its sums lie, and whether q or a
    target row before the last is unreadable, and the last row in use."""
    tiles = tl.arange(0, BLOCK_TILES)
    weight = tl.full([], 1.0, tl.float64)
    node, kept, kept_weight, kept_mass, kept_drawn = (
        weight.to(tl.int32) * 0,
        weight.to(tl.int32) * 0,
        weight,
        weight,
        weight < 0,
    )
    unreadable, is_inside = weight < 0, drafts.in_use > 1
    while is_inside:
        if tl.load(nodes.up_ptr + node + 1) >= 0:
            p, q = load_node(nodes, node + 1)
            unreadable = unreadable | (p != p) | (q != q)
            mass = weight * (1 - p)
            if rest_ptr is not None:  # without draft logits q is 0
                if q > 0:
                    sums_ptr = rest_ptr + node.to(tl.int64) * target.num_tiles
                    mass = tl.sum(tl.load(sums_ptr + tiles, mask=tiles < target.num_tiles, other=0.0), 0)
            passes, next_weight = block_weight(node, weight, p, q, uniform(drafts, node), mass)
            kept = tl.where(passes, node, kept)
            kept_weight, kept_mass = tl.where(passes, weight, kept_weight), tl.where(passes, mass, kept_mass)
            kept_drawn = tl.where(passes, q > 0, kept_drawn)
            weight = next_weight
            node += 1
            is_inside = node + 1 < drafts.in_use
        else:
            is_inside = node < 0
    kept = tl.where((node > 0) & (uniform(drafts, node) < weight), node, kept)
    is_plain = (kept == node) | (kept_mass <= 0)
    a = tl.where(is_plain | ~kept_drawn, 0.0, 1.0).to(tl.float64)
    last = tl.where(is_plain | kept_drawn, 0, kept + 1)
    share = tl.where(a > 0, kept_weight, 1.0)
    return Rest(kept, share, a, last, a > 0), unreadable, node


@triton.jit
def longest_typical(drafts, nodes, BLOCK_NODES: tl.constexpr):
    """Return the deepest node that is reached through nodes above their threshold, of several the first; its depth;
    and whether the threshold of a node that is reached is unknown."""
    best, unreadable = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    for base in range(0, drafts.in_use, BLOCK_NODES):
        at = base + tl.arange(0, BLOCK_NODES)
        up = tl.load(nodes.up_ptr + at, mask=(at >= 1) & (at < drafts.in_use), other=-1)
        own = tl.load(nodes.p_ptr + at, mask=up >= 0, other=0.0)
        is_reached = up >= 0
        depth, ancestor = is_reached.to(tl.int64), tl.maximum(up, 0)
        while tl.max(ancestor, 0) > 0:
            is_below = ancestor > 0
            depth += is_below.to(tl.int64)
            is_reached = is_reached & (tl.load(nodes.p_ptr + ancestor, mask=is_below, other=1.0) == 1.0)
            ancestor = tl.maximum(tl.load(nodes.up_ptr + ancestor, mask=is_below, other=0), 0)
        unreadable += tl.sum((is_reached & (own != own)).to(tl.int32), 0)
        key = tl.where(is_reached & (own == 1.0), (depth << 32) - at, 0)
        best = tl.maximum(best, tl.max(key, 0))
    depth = (best + 0xFFFFFFFF) >> 32
    return ((depth << 32) - best).to(tl.int32), depth.to(tl.int32), unreadable > 0


@triton.jit
def finish(output, count, final, num_nodes, BLOCK_NODES: tl.constexpr):
    """Write count and final token behind the accepted nodes, then -1; nothing but -1 if the final token is -1."""
    count = tl.where(final < 0, 0, count)
    # The accepted nodes may have been written by other threads.
    tl.debug_barrier()
    tl.store(output.count_ptr, count)
    for base in range(0, num_nodes, BLOCK_NODES):
        at = base + tl.arange(0, BLOCK_NODES)
        tokens = tl.where(at == count, final, -1).to(tl.int64)
        tl.store(output.ids_ptr + at, tokens, mask=(at >= count) & (at < num_nodes))
        tl.store(output.accepted_ptr + at, at * 0 - 1, mask=(at >= count) & (at < num_nodes - 1))
