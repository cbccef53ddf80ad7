"""Medusa heads in Triton: residual blocks, vocabulary projection with a streaming top-k, and the merge of its splits.

Rows are (batch row, head) pairs. One launch runs one residual layer of all heads; one launch projects all rows, and
its programs keep only the k best logits and the log-sum-exp of the vocabulary rows that they read; one launch merges
them. ``docs/medusa_project.md`` draws it.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .._registry import OPS
from . import _common
from ._product_tiles import products
from ._topk_tiles import _merge_topk_kernel, add_exponentials, insert, no_keys, sort_keys
from .decoder import rms_norm_triton
from .linear import linear_triton

_ROOT_EPS = 1e-6  # as in the reference
_MERGED_AT_ONCE = 2048  # candidates at most
_MAX_SPLIT = 65535  # rows of a split: a key of 16-bit logits counts them in 16 bits, of which the last means none


@triton.jit(do_not_specialize=["bias_ptr", "batch", "stride_bias_m"])
def _residual_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,  # (B, heads, C)
    batch,
    hidden_size,
    stride_x_b,
    stride_x_m,
    stride_w_m,
    stride_w_c,
    stride_bias_m,
    HAS_BASE: tl.constexpr,
    IS_EVEN: tl.constexpr,  # hidden_size is a multiple of BLOCK_C
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    num_x_tiles = tl.cdiv(batch, BLOCK_R)
    x_tile, tile = tl.program_id(0) % num_x_tiles, tl.program_id(0) // num_x_tiles
    slot, num_slots = tl.program_id(1), tl.num_programs(1)
    rows, cols = x_tile * BLOCK_R + tl.arange(0, BLOCK_R), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < batch, cols < hidden_size
    x_offsets = rows.to(tl.int64) * stride_x_b + slot.to(tl.int64) * stride_x_m
    ok = row_ok[:, None] & col_ok[None, :]
    state = tl.load(x_ptr + x_offsets[:, None] + cols[None, :], mask=ok, other=0.0)
    # Slot 0 is the base model's, if it is asked for: its state passes unchanged.
    head = (slot - 1 if HAS_BASE else slot).to(tl.int64)
    if head >= 0:
        w_offsets = tl.minimum(cols, hidden_size - 1).to(tl.int64) * stride_w_c
        y = products(
            x_ptr, x_offsets, row_ok, w_ptr + head * stride_w_m, w_offsets, hidden_size, IS_EVEN, BLOCK_C, PRECISION
        )
        if bias_ptr is not None:
            y += tl.load(bias_ptr + head * stride_bias_m + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        y = y.to(state.dtype).to(tl.float32)
        state = (state.to(tl.float32) + y / (1 + tl.exp2(y * -1.4426950408889634))).to(state.dtype)  # log2 e
    out_rows = rows.to(tl.int64) * num_slots + slot
    tl.store(out_ptr + out_rows[:, None] * hidden_size + cols[None, :], state, mask=ok)


@triton.jit(do_not_specialize=["num_x", "heads_per_tile", "num_heads", "tiles_per_split", "k"])
def _project_kernel(
    x_ptr,
    w_ptr,
    out_ptr,  # logits (B, M, V); or, with NUM_SLOTS > 0, keys (B, M, splits, K)
    split_lse_ptr,  # (B, M, splits) fp32
    num_x,
    heads_per_tile,  # all of them when w is shared, else 1
    num_heads,
    hidden_size,
    vocab_size,
    tiles_per_split,
    k,
    stride_x_b,
    stride_x_m,
    stride_w_m,
    stride_w_v,
    NUM_SLOTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    num_x_tiles = tl.cdiv(num_x, BLOCK_R)
    x_tile, split = tl.program_id(0) % num_x_tiles, tl.program_id(0) // num_x_tiles
    rows = x_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = rows < num_x
    batch, head = rows // heads_per_tile, rows % heads_per_tile + tl.program_id(1)
    x_offsets = batch.to(tl.int64) * stride_x_b + head.to(tl.int64) * stride_x_m
    out_rows = batch.to(tl.int64) * num_heads + head
    w_ptr += tl.program_id(1).to(tl.int64) * stride_w_m

    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    if NUM_SLOTS > 0:
        best = no_keys(BLOCK_R, NUM_SLOTS, HALF)
        total, peak = tl.zeros([BLOCK_R], tl.float32), tl.full([BLOCK_R], -3.4028234e38, tl.float32)
    first_tile = split * tiles_per_split
    num_tiles = tl.minimum(tiles_per_split, tl.cdiv(vocab_size, BLOCK_N) - first_tile)
    for tile in range(num_tiles):
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        ids = first_tile * BLOCK_N + cols
        ok = (ids < vocab_size)[None, :]
        w_offsets = tl.minimum(ids, vocab_size - 1).to(tl.int64) * stride_w_v
        acc = products(x_ptr, x_offsets, row_ok, w_ptr, w_offsets, hidden_size, IS_EVEN, BLOCK_C, PRECISION)
        logits = acc.to(x_ptr.dtype.element_ty)
        if NUM_SLOTS == 0:
            tl.store(out_ptr + out_rows[:, None] * vocab_size + ids[None, :], logits, mask=row_ok[:, None] & ok)
        else:
            total, peak = add_exponentials(total, peak, tl.where(ok, logits.to(tl.float32), float("-inf")))
            keys = sort_keys(logits, cols[None, :], HALF)
            best = insert(best, tl.where(ok, keys, -(1 << (2 * HALF - 1))))
    if NUM_SLOTS > 0:
        part = out_rows * (tl.num_programs(0) // num_x_tiles) + split
        rank = NUM_SLOTS - 1 - tl.arange(0, NUM_SLOTS)
        tl.store(out_ptr + part[:, None] * k + rank[None, :], best, mask=row_ok[:, None] & (rank < k)[None, :])
        tl.store(split_lse_ptr + part, peak + tl.log2(total) * 0.6931471805599453, mask=row_ok)  # ln 2


@dataclass(frozen=True)
class Plan:
    """Launch parameters of one stage: chosen by shapes, dtypes and the device, never by data."""

    block_r: int
    block_n: int
    block_c: int
    target_programs: int  # that the device holds at once
    compile_options: dict = field(hash=False)  # num_warps, num_stages, and maxnreg where ptxas needs to be told

    @property
    def blocks(self) -> tuple[int, int, int]:
        return self.block_r, self.block_n, self.block_c

    def tiles_per_split(self, vocab_size: int, num_x_tiles: int) -> int:
        """Return how many tiles a program walks, so that all programs run side by side and are equally long."""
        num_tiles = triton.cdiv(vocab_size, self.block_n)
        per_split = triton.cdiv(num_tiles, max(1, self.target_programs // num_x_tiles))
        return min(per_split, _MAX_SPLIT // self.block_n)


@cache
def choose_plan(device: _common.Device, stage: str, dtype: torch.dtype, num_rows: int) -> Plan:
    """Choose the launch parameters of a stage, ``residual`` or ``project``, for so many rows that share a weight.

    The file's own ``rule`` says why its entries are what they are.
    """
    kind = "fp32" if dtype == torch.float32 else "fp16"
    tiles = _common.launch_parameters("medusa_project", device.names)[stage][kind]
    tile = next(t for t in tiles if num_rows <= t.get("max_rows", num_rows))
    # The last option is Triton's default, named because that is changing.
    options = {n: tile[n] for n in ("num_warps", "num_stages", "maxnreg") if n in tile} | {"enable_fp_fusion": True}
    programs = tile["programs"] * device.num_multiprocessors
    return Plan(tile["block_r"], tile["block_n"], tile["block_c"], programs, options)


def medusa_project_triton(
    hidden, w_res, b_res, w_out, *, include_base=False, root=None, w_root=None, b_root=None
) -> Tensor:
    """Launch the kernels without top-k; see `specdec_kernels.medusa_project`."""
    block = {"root": root, "w_root": w_root, "b_root": b_root}
    if hidden.dtype == torch.float64:
        return OPS["medusa_project"].reference(hidden, w_res, b_res, w_out, include_base=include_base, **block)
    num_heads, vocab_size = w_res.shape[0] + include_base, w_out.shape[-2]
    logits = hidden.new_empty(hidden.shape[0], num_heads, vocab_size)
    if hidden.shape[0]:
        with torch.cuda.device_of(hidden):
            x = _run_residual_layers(hidden, w_res, b_res, include_base, **block)
            _project(x, w_out, logits, None, _Split.of(x, w_out), 0)
    return logits


def medusa_project_topk_triton(
    hidden, w_res, b_res, w_out, k, *, vocab_map, include_base=False, root=None, w_root=None, b_root=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels; see `specdec_kernels.medusa_project_topk`."""
    block = {"root": root, "w_root": w_root, "b_root": b_root}
    options = {"vocab_map": vocab_map, "include_base": include_base, **block}
    if hidden.dtype == torch.float64:
        return OPS["medusa_project_topk"].reference(hidden, w_res, b_res, w_out, k, **options)
    batch, num_heads = hidden.shape[0], w_res.shape[0] + include_base
    values = hidden.new_empty(batch, num_heads, k, dtype=torch.float32)
    ids = torch.empty_like(values, dtype=torch.int64)
    lse = hidden.new_empty(batch, num_heads, dtype=torch.float32)
    if batch == 0:
        return values, ids, lse
    with torch.cuda.device_of(hidden):
        x = _run_residual_layers(hidden, w_res, b_res, include_base, **block)
        split = _Split.of(x, w_out)
        key_dtype = torch.int64 if hidden.dtype == torch.float32 else torch.int32
        keys = hidden.new_empty(batch, num_heads, split.count, k, dtype=key_dtype)
        split_lse = hidden.new_empty(batch, num_heads, split.count, dtype=torch.float32)
        _project(x, w_out, keys, split_lse, split, k)
        slots = max(2, triton.next_power_of_2(k))  # Triton 3.6 cannot reduce one row to its greatest key
        _merge_topk_kernel[(batch * num_heads,)](
            *(keys, split_lse, vocab_map, values, ids, lse, split.count, split.length, k),
            0 if vocab_map is None else vocab_map.stride(0),
            *(slots, hidden.dtype == torch.bfloat16),
            max(slots, min(_MERGED_AT_ONCE, triton.next_power_of_2(split.count * k))),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return values, ids, lse


def _root_block(hidden: Tensor, root: Tensor, w_root: Tensor, b_root: Tensor | None) -> Tensor:
    """Return what heads see that are conditioned on the pending token, ``(B, C)``."""
    normed = rms_norm_triton(root, root.new_ones(root.shape[1]), _ROOT_EPS)
    y = linear_triton(torch.cat([hidden, normed], dim=1), [w_root], [] if b_root is None else [b_root], None)
    return F.silu(y, inplace=True).add_(hidden)


def _run_residual_layers(
    hidden: Tensor, w_res: Tensor, b_res: Tensor | None, include_base: bool, *, root, w_root, b_root
) -> Tensor:
    """Return the state ``(B, M, C)`` that each row projects, in one launch a layer."""
    num_heads, num_layers, hidden_size = w_res.shape[:3]
    batch, device = len(hidden), _common.device_of(hidden)
    x = (hidden if root is None else _root_block(hidden, root, w_root, b_root))[:, None]
    x = x.expand(batch, num_heads + (include_base and root is None), hidden_size)
    if include_base and root is not None:
        x = torch.cat([hidden[:, None], x], dim=1)
    plan = choose_plan(device, "residual", hidden.dtype, batch)
    for layer in range(num_layers):
        weight, bias = w_res[:, layer], None if b_res is None else b_res[:, layer]
        out = hidden.new_empty(x.shape)
        grid = (triton.cdiv(batch, plan.block_r) * triton.cdiv(hidden_size, plan.block_n), x.shape[1])
        _residual_kernel[grid](
            *(x, weight, bias, out, batch, hidden_size, *x.stride()[:2], *weight.stride()[:2]),
            *(0 if bias is None else bias.stride(0), include_base, hidden_size % plan.block_c == 0),
            *(_common.dot_precision(hidden), *plan.blocks),
            **plan.compile_options,
        )
        x = out
    return x


@dataclass(frozen=True)
class _Split:
    """How the vocabulary is cut among programs."""

    plan: Plan
    num_x_tiles: int
    tiles: int  # of one split
    count: int

    @property
    def length(self) -> int:
        return self.tiles * self.plan.block_n

    @staticmethod
    def of(x: Tensor, w_out: Tensor) -> "_Split":
        num_groups = w_out.shape[0] if w_out.dim() == 3 else 1  # sets of rows that share a weight
        num_x = x.shape[0] * x.shape[1] // num_groups
        plan = choose_plan(_common.device_of(x), "project", x.dtype, num_x)
        num_x_tiles = triton.cdiv(num_x, plan.block_r)
        tiles = plan.tiles_per_split(w_out.shape[-2], num_x_tiles * num_groups)
        return _Split(plan, num_x_tiles, tiles, triton.cdiv(triton.cdiv(w_out.shape[-2], plan.block_n), tiles))


def _project(x: Tensor, w_out: Tensor, out: Tensor, split_lse: Tensor | None, split: _Split, k: int) -> None:
    own, num_heads = w_out.dim() == 3, x.shape[1]
    _project_kernel[(split.num_x_tiles * split.count, num_heads if own else 1)](
        *(x, w_out, out, split_lse, x.shape[0] * (1 if own else num_heads), 1 if own else num_heads, num_heads),
        *(
            x.shape[2],
            w_out.shape[-2],
            split.tiles,
            k,
            *x.stride()[:2],
            w_out.stride(0) if own else 0,
            w_out.stride(-2),
        ),
        *(
            triton.next_power_of_2(k) if k else 0,
            x.shape[2] % split.plan.block_c == 0,
            _common.dot_precision(x),
            *split.plan.blocks,
        ),
        **split.plan.compile_options,
    )
