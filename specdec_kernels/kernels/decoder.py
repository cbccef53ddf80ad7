"""What a decoder layer does between its linear layers, in Triton: the norm, and rotation with the cache's new rows.

Programs own whole rows (of a norm) or whole heads of one node (of a rotation), so no result depends on other rows. The
roundings are those of separate operations: products are never fused with the sums behind them.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._registry import OPS
from . import _common
from ._launch import Call, launch


@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def _rms_norm_kernel(
    x_ptr,  # (outer, inner, width)
    weight_ptr,
    out_ptr,  # (outer · inner, width)
    eps: tl.float32,
    num_rows: tl.int32,
    num_inner: tl.int32,
    width,
    stride_x_outer,
    stride_x_inner,
    IS_WHOLE: tl.constexpr,  # a row fits into one block
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok, cols = (rows < num_rows)[:, None], tl.arange(0, BLOCK_C)[None, :]
    x_ptrs = x_ptr + (rows // num_inner * stride_x_outer + rows % num_inner * stride_x_inner)[:, None] + cols
    out_ptrs, weight_ptrs = out_ptr + (rows * width)[:, None] + cols, weight_ptr + cols
    if IS_WHOLE:
        ok = row_ok & (cols < width)
        x = tl.load(x_ptrs, mask=ok, other=0.0).to(tl.float32)
        factor = 1 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
        tl.store(out_ptrs, _normed(x, factor, weight_ptrs, cols < width, x_ptr.dtype.element_ty), mask=ok)
    else:
        squares = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for first in range(0, width, BLOCK_C):
            x = tl.load(x_ptrs + first, mask=row_ok & (cols < width - first), other=0.0).to(tl.float32)
            squares += x * x
        factor = 1 / tl.sqrt(tl.sum(squares, 1) / width + eps)
        for first in range(0, width, BLOCK_C):
            col_ok = cols < width - first
            x = tl.load(x_ptrs + first, mask=row_ok & col_ok, other=0.0).to(tl.float32)
            y = _normed(x, factor, weight_ptrs + first, col_ok, x_ptr.dtype.element_ty)
            tl.store(out_ptrs + first, y, mask=row_ok & col_ok)


@triton.jit
def _normed(x, factor, weight_ptrs, ok, dtype: tl.constexpr):
    """Return ``weight · (x · factor)``, both products rounded to the dtype."""
    weight = tl.load(weight_ptrs, mask=ok, other=0.0).to(tl.float32)
    return (weight * (x * factor[:, None]).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _turn(
    x_ptr,
    x_heads,  # offsets of heads
    out_ptr,
    out_heads,
    ok,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Write heads after their norm, if they have one, and the rotation of their first 2 · HALF numbers."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptrs, out_ptrs, ok = x_ptr + x_heads[:, None], out_ptr + out_heads[:, None], ok[:, None]
    half, rest = tl.arange(0, BLOCK_HALF)[None, :], 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    half_ok, rest_ok = half < HALF, rest < D
    low = tl.load(x_ptrs + half, mask=ok & half_ok, other=0.0).to(tl.float32)
    high = tl.load(x_ptrs + HALF + half, mask=ok & half_ok, other=0.0).to(tl.float32)
    tail = tl.load(x_ptrs + rest, mask=ok & rest_ok, other=0.0).to(tl.float32)
    # Heads may be written where they were read: by then, every lane has read.
    tl.debug_barrier()
    if norm_ptr is not None:
        total = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(tail * tail, 1)
        factor = 1 / tl.sqrt(total / D + eps)
        low = _normed(low, factor, norm_ptr + half, half_ok, dtype).to(tl.float32)
        high = _normed(high, factor, norm_ptr + HALF + half, half_ok, dtype).to(tl.float32)
        tail = _normed(tail, factor, norm_ptr + rest, rest_ok, dtype).to(tl.float32)
    if HALF > 0:
        low_cos = (low * tl.load(cos_ptr + half, mask=half_ok, other=0.0).to(tl.float32)).to(dtype)
        high_cos = (high * tl.load(cos_ptr + HALF + half, mask=half_ok, other=0.0).to(tl.float32)).to(dtype)
        low_sin = (high * tl.load(sin_ptr + half, mask=half_ok, other=0.0).to(tl.float32)).to(dtype)
        high_sin = (low * tl.load(sin_ptr + HALF + half, mask=half_ok, other=0.0).to(tl.float32)).to(dtype)
        out_low = low_cos.to(tl.float32) - low_sin.to(tl.float32)
        out_high = high_cos.to(tl.float32) + high_sin.to(tl.float32)
        tl.store(out_ptrs + half, out_low.to(dtype), mask=ok & half_ok)
        tl.store(out_ptrs + HALF + half, out_high.to(dtype), mask=ok & half_ok)
    if 2 * HALF < D:
        tl.store(out_ptrs + rest, tail.to(dtype), mask=ok & rest_ok)


@triton.jit(
    do_not_specialize=[
        *("prefix_len_ptr", "slots_ptr", "first_node", "num_nodes", "num_q_heads", "num_kv_heads"),
        *("stride_len", "stride_slots"),
    ]
)
def _rotary_cache_write_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    prefix_len_ptr,
    slots_ptr,
    eps: tl.float32,
    first_node: tl.int64,
    num_nodes: tl.int32,
    num_q_heads: tl.int32,
    num_kv_heads: tl.int32,
    stride_len: tl.int64,
    stride_slots: tl.int64,
    stride_qkv_b,
    stride_qkv_t,
    stride_qkv_h,
    stride_angle_b,
    stride_angle_t,
    stride_k_b,
    stride_k_s,
    stride_k_h,
    stride_v_b,
    stride_v_s,
    stride_v_h,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    node, batch = (tl.program_id(0) % num_nodes).to(tl.int64), (tl.program_id(0) // num_nodes).to(tl.int64)
    num_q_tiles, num_kv_tiles = tl.cdiv(num_q_heads, BLOCK_H), tl.cdiv(num_kv_heads, BLOCK_H)
    tile, lanes = tl.program_id(1), tl.arange(0, BLOCK_H)
    row = tl.load(prefix_len_ptr + batch * stride_len).to(tl.int64) + first_node + node
    slot = batch
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + batch * stride_slots).to(tl.int64)
    qkv_ptr += batch * stride_qkv_b + node * stride_qkv_t
    angles = batch * stride_angle_b + node * stride_angle_t
    cos_ptr += angles
    sin_ptr += angles
    if tile < num_q_tiles:
        heads = (tile * BLOCK_H + lanes).to(tl.int64)
        ok, q = heads < num_q_heads, heads * stride_qkv_h
        _turn(qkv_ptr, q, qkv_ptr, q, ok, q_norm_ptr, cos_ptr, sin_ptr, eps, D, HALF, BLOCK_HALF, BLOCK_REST)
    elif tile < num_q_tiles + num_kv_tiles:
        heads = ((tile - num_q_tiles) * BLOCK_H + lanes).to(tl.int64)
        ok, k = heads < num_kv_heads, (num_q_heads + heads) * stride_qkv_h
        to = slot * stride_k_b + row * stride_k_s + heads * stride_k_h
        _turn(qkv_ptr, k, k_ptr, to, ok, k_norm_ptr, cos_ptr, sin_ptr, eps, D, HALF, BLOCK_HALF, BLOCK_REST)
    else:
        heads = ((tile - num_q_tiles - num_kv_tiles) * BLOCK_H + lanes).to(tl.int64)
        ok, v = heads < num_kv_heads, (num_q_heads + num_kv_heads + heads) * stride_qkv_h
        to = slot * stride_v_b + row * stride_v_s + heads * stride_v_h
        dims = tl.arange(0, BLOCK_D)[None, :]
        inside = ok[:, None] & (dims < D)
        values = tl.load(qkv_ptr + v[:, None] + dims, mask=inside)
        tl.store(v_ptr + to[:, None] + dims, values, mask=inside)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity
class Plan:
    """Launch parameters of one kernel: chosen by the width of a row and its dtype, never by the number of rows."""

    block_r: int  # rows, or heads, of a program
    block_c: int
    compile_options: dict


@cache
def choose_plan(device: _common.Device, kernel: str, width: int, dtype: torch.dtype) -> Plan:
    """Choose the launch parameters of ``rms_norm`` or ``rotary_cache_write``; the file's ``rule`` says why so."""
    facts = _common.launch_parameters("decoder", device.names)[kernel]
    block_c = min(triton.next_power_of_2(width), facts["max_block"])
    block_r = max(1, facts["numbers"] // block_c)
    warps = block_r * block_c // (facts["lanes"] * (facts["lane_bytes"] // dtype.itemsize))
    # Products that are rounded by themselves in torch are not to be fused with sums.
    options = {"num_warps": max(1, min(warps, facts["max_warps"])), "enable_fp_fusion": False}
    return Plan(block_r, block_c, options)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch the kernel; see `specdec_kernels.rms_norm`."""
    if x.dtype == torch.float64:
        return OPS["rms_norm"].reference(x, weight, eps)
    out = x.new_empty(x.shape)
    if out.numel() > 0:
        with torch.cuda.device_of(x):
            launch(*rms_norm_call(x, weight, eps, out))
    return out


def rms_norm_call(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Call:
    """Return the launch that writes to ``out``, which is contiguous and not empty."""
    rows, width = _common.rows_of(x), x.shape[-1]
    plan = choose_plan(_common.device_of(x), "rms_norm", width, x.dtype)
    num_rows, strides = rows.shape[0] * rows.shape[1], rows.stride()[:2]
    constants = width <= plan.block_c, plan.block_r, plan.block_c
    args = (rows, weight, out, float(eps), num_rows, rows.shape[1], width, *strides, *constants)
    facts = plan, x.dtype, width, strides, rows.data_ptr() % 16, weight.data_ptr() % 16
    return Call(_rms_norm_kernel, (triton.cdiv(num_rows, plan.block_r), 1, 1), args, plan.compile_options, facts)


def rotary_cache_write_triton(
    qkv, cos, sin, k_cache, v_cache, prefix_len, *, first_node, slots, q_norm, k_norm, eps
) -> None:
    """Launch the kernel; see `specdec_kernels.rotary_cache_write_`."""
    tensors = qkv, cos, sin, k_cache, v_cache, prefix_len
    options = {"first_node": first_node, "slots": slots, "q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    if qkv.dtype == torch.float64:
        OPS["rotary_cache_write_"].reference(*tensors, **options)
    elif qkv.numel() > 0:
        with torch.cuda.device_of(qkv):
            launch(*rotary_cache_write_call(*tensors, **options))


def rotary_cache_write_call(
    qkv, cos, sin, k_cache, v_cache, prefix_len, *, first_node, slots, q_norm, k_norm, eps
) -> Call:
    """Return the launch, for a ``qkv`` that is not empty."""
    batch, num_nodes, num_heads, head_dim = qkv.shape
    num_kv_heads = k_cache.shape[2]
    half, angle_strides = 0, (0, 0)
    if cos is not None:
        half = cos.shape[2] // 2
        angle_strides = (0 if cos.shape[0] == 1 else cos.stride(0)), cos.stride(1)
    if half == 0:
        cos = sin = qkv  # any address: nothing is read there
    plan = choose_plan(_common.device_of(qkv), "rotary_cache_write", head_dim, qkv.dtype)
    strides = (*qkv.stride()[:3], *angle_strides, *k_cache.stride()[:3], *v_cache.stride()[:3])
    blocks = (triton.next_power_of_2(x) for x in (max(half, 1), max(head_dim - 2 * half, 1), head_dim))
    tensors = (qkv, cos, sin, k_cache, v_cache, q_norm, k_norm)
    num_q_heads = num_heads - 2 * num_kv_heads
    tiles = triton.cdiv(num_q_heads, plan.block_r) + 2 * triton.cdiv(num_kv_heads, plan.block_r)
    addresses = tuple(None if t is None else t.data_ptr() % 16 for t in tensors)
    args = (
        *(*tensors, prefix_len, slots, eps, first_node, num_nodes, num_q_heads, num_kv_heads),
        *(prefix_len.stride(0), 0 if slots is None else slots.stride(0), *strides),
        *(head_dim, half, plan.block_r, *blocks),
    )
    facts = plan, qkv.dtype, half, head_dim, strides, addresses, slots is None
    return Call(_rotary_cache_write_kernel, (batch * num_nodes, tiles, 1), args, plan.compile_options, facts)
