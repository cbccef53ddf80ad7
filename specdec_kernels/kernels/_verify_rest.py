"""What the target still wants after rejections: sums over the vocabulary, and the final draw.

After the children of a node up to some node have been rejected, id v is wanted with the weight

    rest(v) = max(share * p(v) - a * q(v), 0),  0 for the rejected ids

because rejecting drafts from q one after the other subtracts multiples of q, which add up to a, and cutting off at 0
in between changes nothing. Chosen drafts leave a = 0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._verify_nodes import load_ids, mapped_weights, seen_before, uniform
from ._verify_rows import Row, best_ids, load_logits, open_row, probs


class Rest(NamedTuple):
    """What is left at a node; children up to ``last`` are rejected, 0: none."""

    node: Any
    share: Any
    a: Any
    last: Any
    reads_q: Any  # whether q matters: a > 0, or it is to be summed


@triton.jit
def open_draft(draft, rest, BLOCK_TILES: tl.constexpr):
    """Return the draft's `Row` at the node."""
    peak, inverse = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    if rest.reads_q:
        row, _shares = open_row(draft, rest.node, BLOCK_TILES)
        peak, inverse = row.peak, row.inverse
    return Row(draft.ptr + rest.node.to(tl.int64) * draft.stride, peak, inverse, draft.scale)


@triton.jit
def without_rejected(weights, q, ids, tile, drafts, nodes, rest, BLOCK: tl.constexpr, BLOCK_NODES: tl.constexpr):
    """Return a tile's weights, and those of q, with 0 for the rejected ids."""
    for base in range(0, rest.last + 1, BLOCK_NODES):
        at = base + tl.arange(0, BLOCK_NODES)
        up = tl.load(nodes.up_ptr + at, mask=(at >= 1) & (at <= rest.last), other=-1)
        here = (up == rest.node) & (load_ids(drafts, at, up == rest.node) // BLOCK == tile)
        if tl.sum(here.to(tl.int32), 0) > 0:
            for node in range(tl.maximum(base, 1), tl.minimum(base + BLOCK_NODES, rest.last + 1)):
                if tl.load(nodes.up_ptr + node) == rest.node:
                    is_rejected = ids == load_ids(drafts, node, node >= 0)
                    weights = tl.where(is_rejected, 0.0, weights)
                    q = tl.where(is_rejected, 0.0, q)
    return weights, q


@triton.jit
def rest_of_tile(
    tile, row, q_row, target, drafts, nodes, vocab_map, rest, BLOCK: tl.constexpr, BLOCK_NODES: tl.constexpr
):
    """Return ids, rest, and q without the rejected ids, of one tile."""
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    weights = rest.share * probs(row, load_logits(row.ptr, ids, target.size))
    q = tl.zeros([BLOCK], tl.float64)
    if nodes.q_ptr is not None:
        if rest.reads_q:
            if vocab_map.starts_ptr is None:
                q = probs(q_row, load_logits(q_row.ptr, ids, target.size))
            else:
                ok = ids < target.size
                q = mapped_weights(q_row.ptr, ids, ok, q_row.peak, q_row.scale, vocab_map) * q_row.inverse
            weights = tl.maximum(weights - rest.a * q, 0.0)
    if rest.last > 0:
        weights, q = without_rejected(weights, q, ids, tile, drafts, nodes, rest, BLOCK, BLOCK_NODES)
    return ids, weights, q


@triton.jit
def sum_tiles(
    first,
    end,
    rest_ptr,
    left_ptr,
    target,
    draft,
    drafts,
    nodes,
    vocab_map,
    rest,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write each tile's sums of rest, and of q without the rejected ids; return both for all the tiles."""
    row, _shares = open_row(target, rest.node, BLOCK_TILES)
    q_row = None
    if nodes.q_ptr is not None:
        q_row = open_draft(draft, rest, BLOCK_TILES)
    mass, left = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for tile in range(first, end):
        _ids, weights, q = rest_of_tile(tile, row, q_row, target, drafts, nodes, vocab_map, rest, BLOCK, BLOCK_NODES)
        tile_mass = tl.sum(weights, 0)
        mass += tile_mass
        if rest_ptr is not None:
            tl.store(rest_ptr + tile, tile_mass)
        if left_ptr is not None:
            tile_left = tl.sum(q, 0)
            left += tile_left
            tl.store(left_ptr + tile, tile_left)
    return mass, left


@triton.jit
def without_chosen(shares, tiles, drafts, nodes, rest, BLOCK: tl.constexpr, BLOCK_NODES: tl.constexpr):
    """Return the tiles' shares of p without the rejected ids, and which of them subtraction leaves in doubt."""
    before = shares
    for node in range(1, rest.last + 1):
        if tl.load(nodes.up_ptr + node) == rest.node:
            token = load_ids(drafts, node, node >= 0)
            if not seen_before(drafts, nodes, rest.node, node - 1, token, BLOCK_NODES):
                shares = tl.where(tiles == token // BLOCK, shares - tl.load(nodes.p_ptr + node), shares)
    return shares, (before > 0) & (shares < 1e-3 * before)


@triton.jit
def last_where(found, values):
    return tl.max(tl.where(found, values, -1), 0)


@triton.jit
def first_where(found, values):
    """Return the first of rising values that is marked, 2^30 if none is."""
    return tl.min(tl.where(found, values, 1073741824), 0)


@triton.jit
def draw_final(
    rest_ptr,
    target,
    draft,
    drafts,
    nodes,
    vocab_map,
    rest,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Return the first id whose cumulative rest exceeds uniform 0 of the sum, never one of rest 0; -1: unreadable.

    The tile is found by the tiles' sums: those at ``rest_ptr`` if a > 0, else those of the first launch.
    """
    tiles = tl.arange(0, BLOCK_TILES)
    row, shares = open_row(target, rest.node, BLOCK_TILES)
    q_row = None
    if nodes.q_ptr is not None:
        q_row = open_draft(draft, rest, BLOCK_TILES)
    in_doubt = tiles < 0
    if (rest.last > 0) & (rest.a <= 0):
        shares, in_doubt = without_chosen(shares, tiles, drafts, nodes, rest, BLOCK, BLOCK_NODES)
    if rest_ptr is not None:
        if rest.a > 0:
            shares = tl.load(rest_ptr + tiles, mask=tiles < target.num_tiles, other=0.0)
    token, is_open = rest.node * 0, rest.node >= 0
    while is_open:
        tile = first_where(in_doubt, tiles)
        is_open = tile < BLOCK_TILES
        level = uniform(drafts, rest.node * 0) * tl.sum(shares, 0)
        if not is_open:
            tile = first_where((tl.cumsum(shares, 0) > level) & (shares > 0), tiles)
            if tile >= BLOCK_TILES:
                tile = tl.maximum(last_where(shares > 0, tiles), 0)
        ids, weights, _q = rest_of_tile(tile, row, q_row, target, drafts, nodes, vocab_map, rest, BLOCK, BLOCK_NODES)
        if is_open:
            shares = tl.where(tiles == tile, tl.sum(weights, 0), shares)
            in_doubt = in_doubt & (tiles != tile)
        else:
            before = tl.sum(tl.where(tiles < tile, shares, 0.0), 0)
            token = first_where((before + tl.cumsum(weights, 0) > level) & (weights > 0), ids)
            if token >= target.size:
                token = tl.maximum(last_where(weights > 0, ids), 0)
    return tl.where(row.peak == row.peak, token, -1)


@triton.jit
def greedy_final(target, node, BLOCK_TILES: tl.constexpr):
    """Return the first id of the row's largest logit, -1 if it cannot be judged."""
    rows = node + tl.zeros([1], tl.int32)
    return tl.max(best_ids(target, rows, rows >= 0, tl.arange(0, BLOCK_TILES)), 0)
