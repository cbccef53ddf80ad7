"""Tree attention in Triton: one kernel for contiguous and paged caches, and the merge of its KV splits.

A program owns one tile of packed rows (row ``r`` is node ``r // G`` and head ``r % G`` of a KV head's group) and one
range of keys. Whole prefix tiles are scored without any mask; the tiles at the borders (the draft block, and the lower
edge of a window) take a 64-bit word of visible keys for each row. ``docs/tree_attention.md`` draws it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._registry import OPS
from . import _common
from ._attention_plan import MERGE_OPTIONS, Plan, choose_plan, geometry
from ._attention_tiles import (
    accumulate,
    depths,
    dots_of,
    load_rows,
    load_sinks,
    locate,
    merge_splits_kernel,
    or_words,
    scores_of,
    split_keys,
    unpack,
    visible_words,
)
from ._launch import Call, launch


# Arguments with a type cost Triton nothing at a launch; the others it looks at each time.
@triton.jit(
    do_not_specialize=[
        *("table_ptr", "mask_ptr", "prefix_len_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr"),
        *("window", "num_nodes", "group_size", "num_splits", "min_split_len"),
        *("stride_table_b", "stride_mask_b", "stride_k_scale", "stride_v_scale"),
    ]
)
def _tree_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,  # (B, max_pages), None when PAGE = 0
    mask_ptr,
    prefix_len_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,  # (B, num_splits, T, Hq, DV) fp32
    partial_lse_ptr,  # (B, num_splits, T, Hq) fp32, base 2
    scale: tl.float32,
    softcap,
    window,
    num_nodes: tl.int32,
    num_splits: tl.int32,
    min_split_len: tl.int32,
    group_size: tl.int32,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,  # of a page when PAGE > 0
    stride_k_s,
    stride_k_h,
    stride_v_b,
    stride_v_s,
    stride_v_h,
    stride_table_b: tl.int64,
    stride_mask_b: tl.int64,
    stride_k_scale: tl.int64,
    stride_v_scale: tl.int64,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # dims of q and k at a time
    BLOCK_DV: tl.constexpr,
):
    num_row_tiles = tl.cdiv(num_nodes * group_size, BLOCK_M)
    row_tile, split = tl.program_id(0) % num_row_tiles, tl.program_id(0) // num_row_tiles
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    prefix_len = tl.load(prefix_len_ptr + batch)
    first, num_tiles, num_active = split_keys(prefix_len, num_nodes, window, num_splits, min_split_len, BLOCK_N)
    if split >= num_active:
        return
    start = first + split * num_tiles // num_active * BLOCK_N
    end = tl.minimum(first + (split + 1) * num_tiles // num_active * BLOCK_N, prefix_len + num_nodes)

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok, nodes, q_heads = unpack(rows, num_nodes, group_size, head)
    num_words = (num_nodes + 63) // 64
    mask_ptr += batch * stride_mask_b
    cols, dims, v_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_offsets = batch * stride_q_b + nodes.to(tl.int64) * stride_q_t + q_heads.to(tl.int64) * stride_q_h
    q = load_rows(q_ptr, q_offsets, dims, row_ok, D, BLOCK_D)
    k_ptr += head.to(tl.int64) * stride_k_h
    v_ptr += head.to(tl.int64) * stride_v_h
    if PAGE == 0:
        k_ptr += batch * stride_k_b
        v_ptr += batch * stride_v_b
    else:
        table_ptr += batch * stride_table_b
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + head * stride_k_scale).to(tl.float32)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -3.4028234e38, tl.float32)  # finite, so that peak - peak is 0
    if sinks_ptr is not None:  # a key of the first split that has no value
        peak = tl.where(split == 0, load_sinks(sinks_ptr, q_heads, row_ok), peak)
        total += tl.where(split == 0, 1.0, 0.0)

    # Tiles in [plain_start, plain_end) are seen whole by every row.
    plain_start, plain_end = start, tl.maximum(tl.minimum(prefix_len // BLOCK_N * BLOCK_N, end), start)
    positions = prefix_len
    if window is not None:
        positions += depths(mask_ptr, nodes, row_ok, num_words)
        # No node is deeper than num_nodes − 1. The exact bound would need a reduction for a tile or two.
        plain_start = tl.cdiv(tl.maximum(prefix_len + num_nodes - window, 0), BLOCK_N) * BLOCK_N
        plain_start = tl.minimum(tl.maximum(plain_start, start), plain_end)
    for tile in tl.range((plain_end - plain_start) // BLOCK_N):
        page, row = locate(table_ptr, plain_start + tile * BLOCK_N, cols, end, PAGE, BLOCK_N)
        k_offsets = page * stride_k_b + row * stride_k_s
        k = load_rows(k_ptr, k_offsets, dims, None, D, BLOCK_D)
        v = load_rows(v_ptr, page * stride_v_b + row * stride_v_s, v_dims, None, DV, BLOCK_DV)
        dots = dots_of(q, k, q_ptr, q_offsets, row_ok, k_ptr, k_offsets, None, D, BLOCK_D, PRECISION)
        scores = scores_of(dots, scale, softcap)
        acc, total, peak = accumulate(acc, total, peak, scores, v, q.dtype, PRECISION)

    num_edge = (plain_start - start) // BLOCK_N
    for tile in tl.range(num_edge + tl.cdiv(end - plain_end, BLOCK_N), num_stages=1):
        key = tl.where(tile < num_edge, start + tile * BLOCK_N, plain_end + (tile - num_edge) * BLOCK_N)
        words = visible_words(mask_ptr, nodes, row_ok, key - prefix_len, num_words)
        union = tl.reduce(words, 0, or_words)
        if union != 0:
            # Keys that no row of the tile sees are not even loaded: they may be NaN.
            key_ok = (((union >> cols.to(tl.uint64)) & 1) != 0) & (key + cols < end)
            visible = ((words[:, None] >> cols[None, :].to(tl.uint64)) & 1) != 0
            visible &= key_ok[None, :]
            if window is not None:
                draft = key + cols - prefix_len
                key_depths = depths(mask_ptr, draft, key_ok & (draft >= 0), num_words)
                key_positions = tl.where(draft < 0, key + cols, prefix_len + key_depths)
                key_ok &= key_positions > prefix_len - window
                visible &= positions[:, None] - key_positions[None, :] < window
            page, row = locate(table_ptr, key, cols, end, PAGE, BLOCK_N)
            k_offsets = page * stride_k_b + row * stride_k_s
            k = load_rows(k_ptr, k_offsets, dims, key_ok, D, BLOCK_D)
            dots = dots_of(q, k, q_ptr, q_offsets, row_ok, k_ptr, k_offsets, key_ok, D, BLOCK_D, PRECISION)
            scores = tl.where(visible, scores_of(dots, scale, softcap), float("-inf"))
            v = load_rows(v_ptr, page * stride_v_b + row * stride_v_s, v_dims, key_ok, DV, BLOCK_DV)
            acc, total, peak = accumulate(acc, total, peak, scores, v, q.dtype, PRECISION)

    # From a length that is read anew, so that the compiler computes this anew, too: kept over the loops it would take
    # the registers that a tile of 64 rows and 256 dims needs.
    rows += tl.load(prefix_len_ptr + batch) - prefix_len
    row_ok, nodes, q_heads = unpack(rows, num_nodes, group_size, head)
    own_word = tl.load(mask_ptr + nodes * num_words + (nodes >> 6), mask=row_ok, other=0)
    is_node = ((own_word >> (nodes & 63).to(tl.int64)) & 1) != 0
    empty_lse = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        empty_lse = tl.where(split == 0, load_sinks(sinks_ptr, q_heads, row_ok), empty_lse)
    lse = tl.where(is_node, peak + tl.log2(total), empty_lse)
    inverse = 1 / tl.where(total == 0, 1, total)
    if v_scale_ptr is not None:
        inverse *= tl.load(v_scale_ptr + head * stride_v_scale).to(tl.float32)
    out = tl.where(is_node[:, None], acc * inverse[:, None], 0)
    out_ok = row_ok[:, None] & (v_dims < DV)[None, :]
    num_q_heads = tl.num_programs(1) * group_size
    if num_active == 1:
        index = (batch * num_nodes + nodes) * num_q_heads + q_heads
        tl.store(out_ptr + index[:, None] * DV + v_dims[None, :], out.to(out_ptr.dtype.element_ty), mask=out_ok)
        tl.store(lse_ptr + index, lse * 0.6931471805599453, mask=row_ok)
    else:
        index = ((batch * num_splits + split) * num_nodes + nodes) * num_q_heads + q_heads
        tl.store(partial_ptr + index[:, None] * DV + v_dims[None, :], out, mask=out_ok)
        tl.store(partial_lse_ptr + index, lse, mask=row_ok)


def tree_attention_triton(q, k_cache, v_cache, tree_mask, prefix_len, **options) -> tuple[Tensor, Tensor]:
    """Launch the kernel over a contiguous cache; see `specdec_kernels.tree_attention`."""
    plan = plan_of(q, k_cache, v_cache)
    if plan is None:
        return OPS["tree_attention"].reference(q, k_cache, v_cache, tree_mask, prefix_len, **options)
    return _attend(plan, q, k_cache, v_cache, None, tree_mask, prefix_len, **options)


def paged_tree_attention_triton(
    q, k_cache, v_cache, block_table, tree_mask, prefix_len, **options
) -> tuple[Tensor, Tensor]:
    """Launch the kernel over a paged cache; see `specdec_kernels.paged_tree_attention`."""
    args = (q, k_cache, v_cache, block_table, tree_mask, prefix_len)
    plan = plan_of(q, k_cache, v_cache)
    if plan is None:
        return OPS["paged_tree_attention"].reference(*args, **options)
    return _attend(plan, *args, **options)


def plan_of(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Plan | None:
    """Return the launch parameters of a call; None where the reference serves it."""
    q_shape, v_shape = q.shape, v_cache.shape
    num_rows = q_shape[1] * (q_shape[2] // v_shape[2])
    device, precision = _common.device_of(q), _common.dot_precision(q)
    dims = q_shape[3], v_shape[3]
    return choose_plan(device, q.dtype, k_cache.dtype, *dims, num_rows, precision, _is_aligned(q, k_cache, v_cache))


def _is_aligned(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Say whether tiles can be read 16 bytes at a time: Triton asks for strides and addresses in multiples of 16."""
    bits = q.shape[3] | v_cache.shape[3]
    for tensor in (q, k_cache, v_cache):
        outer, row, head, _ = tensor.stride()
        bits |= outer | row | head | tensor.data_ptr()
    return bits % 16 == 0


def _attend(plan: Plan, q, k_cache, v_cache, table, tree_mask, prefix_len, **options) -> tuple[Tensor, Tensor]:
    batch, num_nodes, num_q_heads, _ = q.shape
    out = q.new_empty((batch, num_nodes, num_q_heads, v_cache.shape[3]))
    lse = q.new_empty((batch, num_nodes, num_q_heads), dtype=torch.float32)
    if batch > 0:
        with torch.cuda.device_of(q):
            caches, tree, results = (k_cache, v_cache), (tree_mask, prefix_len), (out, lse)
            for call in attention_calls(plan, q, caches, table, tree, results, **options):
                launch(*call)
    return out, lse


def attention_calls(
    plan: Plan,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    table: Tensor | None,
    tree: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> list[Call]:
    """Return the launches, one or two, that write the results: contiguous ``out`` and ``lse``, which are not empty."""
    (k_cache, v_cache), (tree_mask, prefix_len), (out, lse) = caches, tree, results
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    sizes = (q.shape, q.stride()), k_cache.stride(), (v_cache.shape, v_cache.stride())
    pages = None if table is None else (table.shape, table.stride())
    form = geometry(plan, *sizes, pages, tree_mask.shape[0] == 1, window)
    partial = partial_lse = lse  # without splits anything of that dtype serves: nothing is written
    if form.num_splits > 1:
        partial = lse.new_empty(form.partial_shape)
        partial_lse = lse.new_empty(form.partial_shape[:4])
    if k_cache.dtype == torch.float8_e4m3fn and not _common.device_of(q).has_fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if window is not None:
        window = min(window, 2**30)
    prefix_len = prefix_len.contiguous()
    vectors = sinks if sinks is None else sinks.contiguous(), k_scale, v_scale
    kinds, scale_strides = _describe(vectors)
    args = (
        *(q, k_cache, v_cache, table, tree_mask.contiguous(), prefix_len, *vectors, out, lse, partial, partial_lse),
        *(form.scale if scale is None else scale, softcap, window, *form.sizes),
        *(*form.rest, *scale_strides, *form.constants),
    )
    # Tensors that torch has just made are aligned.
    addresses = q.data_ptr() % 16, k_cache.data_ptr() % 16, v_cache.data_ptr() % 16
    facts = form.facts, softcap is None, window is None, kinds, addresses
    calls = [Call(_tree_attention_kernel, form.grid, args, plan.compile_options, facts)]
    if form.num_splits > 1:
        args = partial, partial_lse, prefix_len, out, lse, window, *form.sizes, *plan.merge_arguments
        calls.append(Call(merge_splits_kernel, form.merge_grid, args, MERGE_OPTIONS, (plan, window is None)))
    return calls


def _describe(vectors: tuple[Tensor | None, Tensor | None, Tensor | None]) -> tuple[tuple, tuple[int, int]]:
    """Return the dtypes of sinks and scales, and the strides of the scales."""
    if vectors[0] is None and vectors[1] is None and vectors[2] is None:
        return vectors, (0, 0)
    k_stride, v_stride = (0 if x is None or x.dim() == 0 else x.stride(0) for x in vectors[1:])
    return tuple(None if x is None else x.dtype for x in vectors), (k_stride, v_stride)
