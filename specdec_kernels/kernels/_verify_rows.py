"""Softmax over rows of logits, cut into tiles: their statistics, and the weights of single ids.

A weight is ``exp((logit - largest) / temperature)``. Weights and sums are double, as on the CPU: what is left of a
distribution after a rejection is a difference of probabilities, and back ends must agree on where it lies. That costs
about as much as fp32 with compensated exponents would, on GPUs that calculate doubles at half the rate of fp32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Logits(NamedTuple):
    """Rows of logits as the launcher passes them: row n of batch row b starts at ``b * stride_b + n * stride_n``."""

    ptr: Any
    stride_b: Any
    stride_n: Any
    size: Any  # ids in a row


class Statistics(NamedTuple):
    """What the first launch leaves for each row of logits and tile, ``(B, rows, tiles)``."""

    peak_ptr: Any  # fp32, the largest logit; +inf if one is NaN or +inf
    total_ptr: Any  # fp64, the sum of weights relative to the tile's peak; greedy rows: the first id of the peak
    logs_ptr: Any  # fp64, the sum of weight * log2(weight); None unless the entropy is needed


class Law(NamedTuple):
    """The rows of one batch row, ``(rows, size)``."""

    ptr: Any
    stride: Any
    size: Any
    stats: Any
    first: Any  # where its statistics begin
    num_tiles: Any
    scale: Any  # log2(e) / temperature


class Row(NamedTuple):
    """One row, its tiles put together."""

    ptr: Any
    peak: Any
    inverse: Any  # of the sum of weights
    scale: Any


@triton.jit
def exp2(t):
    """Return 2^t of doubles t <= 0 to 3e-12; 0 below -1020.

    t = n + f with n whole and |f| <= 1/2, and a minimax polynomial for 2^f; n is added to its exponent.
    """
    x = tl.maximum(t, -1100.0)
    shifted = x + 6755399441055744.0  # 1.5 * 2^52: ends in n as an integer
    f = x - (shifted - 6755399441055744.0)
    p = 1.325080551750225e-06 * f + 1.5303700711365693e-05
    p = p * f + 1.5403475186530786e-04
    p = p * f + 1.3333478473685416e-03
    p = p * f + 9.6181291352361400e-03
    p = p * f + 5.5504109063258665e-02
    p = p * f + 2.4022650695888503e-01
    p = p * f + 6.9314718055683240e-01
    p = p * f + 1.0
    bits = p.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    return tl.where(t < -1020.0, 0.0, bits.to(tl.float64, bitcast=True))


@triton.jit
def finite(peak):
    """Return a peak that can be subtracted: 0 where nothing but -inf has been seen."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def load_logits(ptr, ids, size):
    """Load logits of a tile of ids; -inf behind the row."""
    return tl.load(ptr + ids, mask=ids < size, other=float("-inf")).to(tl.float32)


@triton.jit
def summarise_tile(law, row, tile, greedy, BLOCK: tl.constexpr):
    """Write the statistics of one tile of a row."""
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(law.ptr + row.to(tl.int64) * law.stride, ids, law.size)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN too
    peak = tl.max(x, 0)
    at = law.first + row.to(tl.int64) * law.num_tiles + tile
    tl.store(law.stats.peak_ptr + at, peak)
    if greedy:
        total = tl.min(tl.where(x == peak, ids, law.size), 0).to(tl.float64)
    else:
        t = (x.to(tl.float64) - finite(peak).to(tl.float64)) * law.scale
        weights = exp2(t)
        total = tl.sum(weights, 0)
        if law.stats.logs_ptr is not None:
            tl.store(law.stats.logs_ptr + at, tl.sum(weights * tl.maximum(t, -1100.0), 0))
    tl.store(law.stats.total_ptr + at, total)


@triton.jit
def load_tiles(law, rows, ok, tiles):
    """Load peaks and totals of some rows, ``(rows, tiles)``; tiles that are not there weigh nothing."""
    at = law.first + rows.to(tl.int64)[:, None] * law.num_tiles + tiles[None, :]
    there = ok[:, None] & (tiles < law.num_tiles)[None, :]
    peaks = tl.load(law.stats.peak_ptr + at, mask=there, other=float("-inf"))
    return peaks, tl.load(law.stats.total_ptr + at, mask=there, other=0.0)


@triton.jit
def scaled_tiles(law, rows, ok, tiles):
    """Return of some rows the peak, the inverse sum of weights, each tile's weight, and log2 of what it was scaled by.

    Peak and inverse are NaN if a row cannot be judged: it has a NaN or +inf, or nothing but -inf.
    """
    peaks, totals = load_tiles(law, rows, ok, tiles)
    peak = tl.max(peaks, 1)
    is_readable = (peak > float("-inf")) & (peak < float("inf"))
    peak = tl.where(is_readable, peak, float("nan")).to(tl.float64)
    shift = (peaks.to(tl.float64) - peak[:, None]) * law.scale
    weights = tl.where(peaks > float("-inf"), totals * exp2(shift), 0.0)
    # exp2 and max need not pass NaN on.
    inverse = tl.where(is_readable, 1.0 / tl.sum(weights, 1), float("nan"))
    return peak, inverse, weights, shift


@triton.jit
def best_ids(law, rows, ok, tiles):
    """Return of some greedy rows the first id of the largest logit, -1 if a row cannot be judged."""
    peaks, firsts = load_tiles(law, rows, ok, tiles)
    peak = tl.max(peaks, 1)
    is_readable = (peak > float("-inf")) & (peak < float("inf"))
    firsts = tl.where(peaks == peak[:, None], firsts.to(tl.int32), law.size)
    return tl.where(is_readable, tl.min(firsts, 1), -1)


@triton.jit
def open_row(law, row, BLOCK_TILES: tl.constexpr):
    """Return one row as a `Row` and the share of each of its tiles, ``(BLOCK_TILES,)``."""
    rows = row + tl.zeros([1], tl.int32)
    peak, inverse, weights, _ = scaled_tiles(law, rows, rows >= 0, tl.arange(0, BLOCK_TILES))
    peak, inverse = tl.sum(peak, 0), tl.sum(inverse, 0)
    ptr = law.ptr + row.to(tl.int64) * law.stride
    return Row(ptr, peak, inverse, law.scale), tl.sum(weights, 0) * inverse


@triton.jit
def probs(row, logits):
    """Return the probabilities of logits of a row."""
    return exp2((logits.to(tl.float64) - row.peak) * row.scale) * row.inverse


@triton.jit
def is_unreadable(law, row, BLOCK_TILES: tl.constexpr):
    """Say whether a row has a NaN or +inf, or nothing but -inf."""
    opened, _ = open_row(law, row, BLOCK_TILES)
    return opened.peak != opened.peak
