"""Streaming top-k and log-sum-exp over tiles of logits, and the kernel that merges what the splits found.

A logit and its vocabulary row are packed into one integer, the *key*: the upper half orders like the logit, the lower
half is the complement of the row, counted from the split's first. So no two keys are equal, and of equal logits the
lowest row has the greatest key. Keys of 16-bit logits have 32 bits, keys of fp32 logits 64; HALF is half of that. The
lowest integer stands for no key: it would be NaN in a row that no split is long enough to have.
"""

import triton
import triton.language as tl


@triton.jit
def sort_keys(logits, rows, HALF: tl.constexpr):
    """Pack logits and rows into keys; NaN comes after everything else, and the two zeros are equal."""
    lowest: tl.constexpr = -(1 << (HALF - 1))  # both the bits of −0.0 and an order below that of every number
    bits = logits.to(tl.int16 if HALF == 16 else tl.int32, bitcast=True).to(tl.int32)
    order = tl.where(bits == lowest, 0, bits ^ ((bits >> 31) & ~lowest))
    value = logits.to(tl.float32)
    order = tl.where(value != value, lowest, order)
    key_type: tl.constexpr = tl.int32 if HALF == 16 else tl.int64
    return (order.to(key_type) << HALF) | ((1 << HALF) - 1 - rows.to(key_type))


@triton.jit
def value_of(order, HALF: tl.constexpr, IS_BF16: tl.constexpr):
    """Return the fp32 value of a key's upper half."""
    lowest: tl.constexpr = -(1 << (HALF - 1))
    bits = order ^ ((order >> 31) & ~lowest)
    if HALF == 32:
        value = bits.to(tl.float32, bitcast=True)
    elif IS_BF16:
        value = (bits << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(order == lowest, float("nan"), value)


@triton.jit
def no_keys(BLOCK_R: tl.constexpr, NUM_SLOTS: tl.constexpr, HALF: tl.constexpr):
    """Return an empty list of NUM_SLOTS keys for each row."""
    key_type: tl.constexpr = tl.int32 if HALF == 16 else tl.int64
    return tl.full([BLOCK_R, NUM_SLOTS], -(1 << (2 * HALF - 1)), key_type)


@triton.jit
def insert(best, keys):
    """Take the greatest keys of a tile into each row's ascending list. The cost does not depend on the data."""
    # Ascending against descending: the greater of each pair are the greatest of both lists.
    return tl.sort(tl.maximum(best, tl.topk(keys, best.shape[1])))


@triton.jit
def add_exponentials(total, peak, logits):
    """Take a tile into each row's ``total = Σ exp(logit − peak)``. The peak stays finite: ∞ − ∞ is never formed."""
    log2_e: tl.constexpr = 1.4426950408889634
    new_peak = tl.minimum(tl.maximum(peak, tl.max(logits, 1)), 3.4028234e38)
    decay = tl.exp2((peak - new_peak) * log2_e)
    return total * decay + tl.sum(tl.exp2((logits - new_peak[:, None]) * log2_e), 1), new_peak


@triton.jit(do_not_specialize=["map_ptr", "num_splits", "split_len", "k", "stride_map"])
def _merge_topk_kernel(
    keys_ptr,  # (rows, num_splits, K)
    split_lse_ptr,  # (rows, num_splits) fp32
    map_ptr,
    values_ptr,
    ids_ptr,
    lse_ptr,
    num_splits,
    split_len,
    k,
    stride_map,
    NUM_SLOTS: tl.constexpr,
    IS_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    HALF: tl.constexpr = keys_ptr.dtype.element_ty.primitive_bitwidth // 2
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    total, peak = tl.full([1], 0.0, tl.float32), tl.full([1], -3.4028234e38, tl.float32)
    for base in range(0, num_splits, BLOCK):
        splits = base + lanes
        part = tl.load(split_lse_ptr + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
        total, peak = add_exponentials(total, peak, part[None, :])

    best = no_keys(1, NUM_SLOTS, 32)
    none: tl.constexpr = -(1 << (2 * HALF - 1))
    complement: tl.constexpr = (1 << HALF) - 1
    for base in range(0, num_splits * k, BLOCK):
        index = base + lanes
        key = tl.load(keys_ptr + row * num_splits * k + index, mask=index < num_splits * k, other=none)
        vocab_row = (index // k * split_len).to(tl.int64) + (complement - (key & complement).to(tl.int64))
        merged = ((key >> HALF).to(tl.int64) << 32) | (0xFFFFFFFF - vocab_row)
        best = insert(best, tl.where(key == none, -(1 << 63), merged)[None, :])

    rank = NUM_SLOTS - 1 - tl.arange(0, NUM_SLOTS)
    ids = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    out, ok = row * k + rank[None, :], (rank < k)[None, :]
    tl.store(values_ptr + out, value_of((best >> 32).to(tl.int32), HALF, IS_BF16), mask=ok)
    if map_ptr is not None:
        ids = tl.load(map_ptr + ids * stride_map, mask=ok, other=0)
    tl.store(ids_ptr + out, ids, mask=ok)
    lse = peak + tl.log2(total) * 0.6931471805599453  # ln 2
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)
