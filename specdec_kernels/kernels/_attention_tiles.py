"""The steps of the tree attention kernel: what a tile sees, where it lies, the running softmax; and the merge.

Constants are written where they are used: Triton compares global ones at every launch, which costs microseconds.
"""

import triton
import triton.language as tl


@triton.jit
def or_words(a, b):
    return a | b


@triton.jit
def popcount(x):
    """Count the bits of 64-bit words."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def depths(mask_ptr, nodes, ok, num_words):
    """Return each node's depth: the number of bits of its mask row, less one."""
    count = tl.zeros_like(nodes)
    for word in tl.range(num_words, num_stages=1):
        count += popcount(tl.load(mask_ptr + nodes * num_words + word, mask=ok, other=0))
    return count - 1


@triton.jit
def visible_words(mask_ptr, nodes, ok, first, num_words):
    """Return a word for each row: bit n is set iff the row sees key n of the tile that starts at draft key ``first``.

    ``first`` is negative in a tile that starts in the prefix; the prefix is visible to every node.
    """
    word = tl.zeros_like(nodes) + (first >> 6)
    offset = tl.zeros_like(nodes) + (first & 63)
    shift = offset.to(tl.uint64)
    row_ptr = mask_ptr + nodes * num_words + word
    low = tl.load(row_ptr, mask=ok & (word >= 0) & (word < num_words), other=0).to(tl.uint64, bitcast=True)
    straddles = ok & (offset > 0) & (word >= -1) & (word + 1 < num_words)
    high = tl.load(row_ptr + 1, mask=straddles, other=0).to(tl.uint64, bitcast=True)
    # Two shifts, because a shift by 64 is undefined when first is a multiple of 64.
    words = (low >> shift) | ((high << 1) << (63 - shift))
    num_prefix = tl.minimum(tl.maximum(-first, 0), 63).to(tl.uint64)
    prefix = tl.where(first <= -64, ~tl.zeros_like(words), ((tl.zeros_like(words) + 1) << num_prefix) - 1)
    return words | prefix


@triton.jit
def split_keys(prefix_len, num_nodes, window, num_splits, min_split_len, block_n):
    """Return the first key that a batch row needs, how many tiles of keys, and in how many splits they are taken."""
    first = tl.zeros_like(prefix_len)
    if window is not None:
        first = tl.maximum(prefix_len + 1 - window, 0) // block_n * block_n
    num_keys = prefix_len + num_nodes - first
    num_tiles = tl.cdiv(num_keys, block_n)
    split_len = min_split_len * tl.where(num_keys < 1024, 5, 1)  # as in Plan.num_splits
    wanted = tl.minimum(tl.maximum(num_keys // split_len, 1), num_splits)
    return first, num_tiles, tl.minimum(wanted, num_tiles)


@triton.jit
def unpack(rows, num_nodes, group_size, head):
    """Return whether packed rows exist, their nodes and their query heads."""
    return rows < num_nodes * group_size, rows // group_size, head * group_size + rows % group_size


@triton.jit
def load_sinks(sinks_ptr, q_heads, ok):
    """Load the sinks of query heads, in units of ln 2."""
    return tl.load(sinks_ptr + q_heads, mask=ok, other=0).to(tl.float32) * 1.4426950408889634  # log2 e


@triton.jit
def locate(table_ptr, start, rows, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return page and row inside the page of cache rows ``start + rows``; PAGE = 0: a contiguous cache."""
    if PAGE == 0:
        return (start * 0).to(tl.int64), (start + rows).to(tl.int64)
    elif PAGE % BLOCK_N == 0:  # the tile lies in one page
        return tl.load(table_ptr + start // PAGE).to(tl.int64), (start % PAGE + rows).to(tl.int64)
    else:
        row = start + rows
        return tl.load(table_ptr + row // PAGE, mask=row < end, other=0).to(tl.int64), (row % PAGE).to(tl.int64)


@triton.jit
def load_rows(ptr, offsets, dims, rows_ok, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load a (rows, BLOCK_D) tile, ``dims`` of each row; zero where a row is not wanted, or beyond the head dim."""
    ptrs = ptr + offsets[:, None] + dims[None, :]
    if rows_ok is None:
        if D % BLOCK_D == 0:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(dims < D)[None, :], other=0.0)
    else:
        return tl.load(ptrs, mask=rows_ok[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def cached(x, dtype: tl.constexpr):
    """Convert stored values to q's dtype, exactly. Bytes are float8_e4m3fn on a GPU that does not know it."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        # As fp16 bits the exponent is 8 too small; subnormals come out right because the product is exact.
        magnitude = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def tanh(x):
    """Return tanh to fp32 precision: a series near 0, where 1 − 2 / (exp 2x + 1) cancels."""
    two_log2_e: tl.constexpr = 2.8853900817779268
    x2 = x * x
    near = x * (1 + x2 * (-0.33333333 + x2 * (0.13333333 + x2 * (-0.05396825 + x2 * 0.02186949))))
    far = 1 - 2 / (tl.exp2(x * two_log2_e) + 1)
    return tl.where(x2 < 0.04, near, far)


@triton.jit
def dots_of(
    q,
    k,
    q_ptr,
    q_offsets,
    rows_ok,
    k_ptr,
    k_offsets,
    keys_ok,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return q · k for a tile. ``q`` and ``k`` are its first BLOCK_D dims; where D is more, the others are read."""
    dots = tl.dot(q, tl.trans(cached(k, q.dtype)), input_precision=PRECISION)
    for first in tl.range(BLOCK_D, D, BLOCK_D):
        dims = first + tl.arange(0, BLOCK_D)
        more_q = load_rows(q_ptr, q_offsets, dims, rows_ok, D, BLOCK_D)
        more_k = load_rows(k_ptr, k_offsets, dims, keys_ok, D, BLOCK_D)
        dots = tl.dot(more_q, tl.trans(cached(more_k, q.dtype)), dots, input_precision=PRECISION)
    return dots


@triton.jit
def scores_of(dots, scale, softcap):
    """Return the scores of a tile in units of ln 2, so that exp2 serves."""
    log2_e: tl.constexpr = 1.4426950408889634
    if softcap is None:
        return dots * (scale * log2_e)
    else:
        return tanh(dots * (scale / softcap)) * (softcap * log2_e)


@triton.jit
def accumulate(acc, total, peak, scores, v, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Take one tile into the running softmax: ``acc = Σ exp2(s − peak) v``, ``total = Σ exp2(s − peak)``."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(dtype), cached(v, dtype), acc * decay[:, None], input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit(do_not_specialize=["prefix_len_ptr", "window", "num_nodes", "num_splits", "min_split_len", "block_n"])
def merge_splits_kernel(
    partial_ptr,
    partial_lse_ptr,
    prefix_len_ptr,
    out_ptr,
    lse_ptr,
    window,
    num_nodes: tl.int32,
    num_splits: tl.int32,
    min_split_len: tl.int32,
    block_n: tl.int32,  # of the attention kernel
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    row, num_rows, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    prefix_len = tl.load(prefix_len_ptr + batch)
    _, _, num_active = split_keys(prefix_len, num_nodes, window, num_splits, min_split_len, block_n)
    if num_active == 1:  # the attention kernel wrote the result itself
        return
    dims = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    total, peak = tl.full([], 0.0, tl.float32), tl.full([], -3.4028234e38, tl.float32)
    for base in range(0, num_active, BLOCK_S):
        splits = base + tl.arange(0, BLOCK_S)
        ok = splits < num_active
        index = (batch * num_splits + splits) * num_rows + row
        lse = tl.load(partial_lse_ptr + index, mask=ok, other=float("-inf"))
        part_ptrs = partial_ptr + index[:, None] * DV + dims[None, :]
        part = tl.load(part_ptrs, mask=ok[:, None] & (dims < DV)[None, :], other=0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights, decay = tl.exp2(lse - new_peak), tl.exp2(peak - new_peak)
        acc = acc * decay + tl.sum(weights[:, None] * part, 0)
        total, peak = total * decay + tl.sum(weights, 0), new_peak
    index = batch * num_rows + row
    out = acc / tl.where(total == 0, 1, total)
    tl.store(out_ptr + index * DV + dims, out.to(out_ptr.dtype.element_ty), mask=dims < DV)
    tl.store(lse_ptr + index, (peak + tl.log2(total)) * 0.6931471805599453)  # ln 2
