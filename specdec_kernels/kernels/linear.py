"""Linear layers in Triton: several matrices over one input in one launch, with a residual; SiLU(gate) · up in another.

A program multiplies one tile of rows with one tile of weight rows over the whole width, in ascending order: nothing is
split, so nothing is merged, and a matrix is read once for each tile of rows. ``docs/decoder_layer.md`` says what
follows for the bits of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._registry import OPS
from . import _common
from ._launch import Call, launch
from ._product_tiles import products, products_of_two


@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def _linear_kernel(
    x_ptr,  # (outer, inner, width)
    weights,  # pointers, (count, width) each
    biases,  # pointers, or None
    residual_ptr,  # (outer, inner, out_width), or None
    out_ptr,  # (outer · inner, out_width)
    counts,  # rows of each matrix
    weight_strides,
    num_rows: tl.int32,
    num_inner: tl.int32,
    width,
    out_width,
    stride_x_outer,
    stride_x_inner,
    stride_r_outer,
    stride_r_inner,
    NUM_MATRICES: tl.constexpr,
    IS_EVEN: tl.constexpr,  # width is a multiple of BLOCK_C
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    num_x_tiles = tl.cdiv(num_rows, BLOCK_R)
    tile = tl.program_id(0) // num_x_tiles
    rows = tl.program_id(0) % num_x_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok, outer, inner = rows < num_rows, (rows // num_inner).to(tl.int64), (rows % num_inner).to(tl.int64)

    # The matrix that the tile belongs to.
    w_ptr, count, stride_w, column, first_tile = weights[0], counts[0], weight_strides[0], 0, 0
    end_column, end_tile = counts[0], tl.cdiv(counts[0], BLOCK_N)
    if biases is not None:
        bias_ptr = biases[0]
    for i in tl.static_range(1, NUM_MATRICES):
        here = tile >= end_tile
        w_ptr = tl.where(here, weights[i], w_ptr)
        count, stride_w = tl.where(here, counts[i], count), tl.where(here, weight_strides[i], stride_w)
        column, first_tile = tl.where(here, end_column, column), tl.where(here, end_tile, first_tile)
        end_column, end_tile = end_column + counts[i], end_tile + tl.cdiv(counts[i], BLOCK_N)
        if biases is not None:
            bias_ptr = tl.where(here, biases[i], bias_ptr)

    cols = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = row_ok[:, None] & (cols < count)[None, :]
    x_offsets = outer * stride_x_outer + inner * stride_x_inner
    w_offsets = tl.minimum(cols, count - 1).to(tl.int64) * stride_w
    y = products(x_ptr, x_offsets, row_ok, w_ptr, w_offsets, width, IS_EVEN, BLOCK_C, PRECISION)
    if biases is not None:
        y += tl.load(bias_ptr + cols, mask=cols < count, other=0.0).to(tl.float32)[None, :]
    y = y.to(dtype)
    if residual_ptr is not None:
        offsets = (outer * stride_r_outer + inner * stride_r_inner)[:, None] + (column + cols)[None, :]
        y = (tl.load(residual_ptr + offsets, mask=ok, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_width + (column + cols)[None, :], y, mask=ok)


@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def _gated_linear_kernel(
    x_ptr,  # (outer, inner, width)
    gate_ptr,  # (count, width)
    up_ptr,
    gate_bias_ptr,  # or None, like the other
    up_bias_ptr,
    out_ptr,  # (outer · inner, count)
    num_rows: tl.int32,
    num_inner: tl.int32,
    width,
    count,
    stride_x_outer,
    stride_x_inner,
    stride_gate,
    stride_up,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    num_x_tiles = tl.cdiv(num_rows, BLOCK_R)
    rows = tl.program_id(0) % num_x_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(0) // num_x_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < num_rows, cols < count
    x_offsets = (rows // num_inner).to(tl.int64) * stride_x_outer + (rows % num_inner).to(tl.int64) * stride_x_inner
    w_rows = tl.minimum(cols, count - 1).to(tl.int64)
    gate, up = products_of_two(
        *(x_ptr, x_offsets, row_ok, gate_ptr, w_rows * stride_gate, up_ptr, w_rows * stride_up),
        *(width, IS_EVEN, BLOCK_C, PRECISION),
    )
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        up += tl.load(up_bias_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    gate = gate.to(dtype).to(tl.float32)
    gate = (gate / (1 + tl.exp2(gate * -1.4426950408889634))).to(dtype).to(tl.float32)  # log2 e
    y = (gate * up.to(dtype).to(tl.float32)).to(dtype)
    ok = row_ok[:, None] & col_ok[None, :]
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * count + cols[None, :], y, mask=ok)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity
class Plan:
    """Launch parameters of one call: chosen by shapes, dtype and the device, never by data."""

    block_r: int
    block_n: int
    block_c: int
    precision: str  # of tl.dot
    compile_options: dict  # num_warps, num_stages, and maxnreg where ptxas needs to be told

    def constants(self, width: int) -> tuple:
        """Return the last arguments of a kernel."""
        return width % self.block_c == 0, self.precision, self.block_r, self.block_n, self.block_c


@cache
def choose_plan(
    device: _common.Device, op: str, dtype: torch.dtype, num_rows: int, num_columns: int, precision: str = "ieee"
) -> Plan:
    """Choose the launch parameters of an op for so many rows and columns; the file's ``rule`` says why they are so."""
    kind = "fp32" if dtype == torch.float32 else "fp16"
    tiles = _common.launch_parameters("linear", device.names)[op][kind]
    index = next(i for i, tile in enumerate(tiles) if _serves(tile, device, num_rows, num_columns))
    return _plan(device, op, kind, index, precision)


@cache
def _plan(device: _common.Device, op: str, kind: str, index: int, precision: str) -> Plan:
    tile = _common.launch_parameters("linear", device.names)[op][kind][index]
    # The last option is Triton's default, named because that is changing.
    options = {n: tile[n] for n in ("num_warps", "num_stages", "maxnreg") if n in tile} | {"enable_fp_fusion": True}
    return Plan(tile["block_r"], tile["block_n"], tile["block_c"], precision, options)


def _serves(tile: dict, device: _common.Device, num_rows: int, num_columns: int) -> bool:
    enough = device.num_multiprocessors if tile.get("fills", False) else 0
    return num_rows <= tile.get("max_rows", num_rows) and triton.cdiv(num_columns, tile["block_n"]) >= enough


def linear_triton(x: Tensor, weights: list[Tensor], biases: list[Tensor], residual: Tensor | None) -> Tensor:
    """Launch the kernel; see `specdec_kernels.linear`."""
    if x.dtype == torch.float64:
        return OPS["linear"].reference(x, weights, biases, residual)
    out = x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))
    if out.numel() > 0:
        with torch.cuda.device_of(x):
            launch(*linear_call(x, weights, biases, residual, out))
    return out


def linear_call(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None, out: Tensor
) -> Call:
    """Return the launch that writes to ``out``, which is contiguous and not empty."""
    counts, width = tuple(weight.shape[0] for weight in weights), x.shape[-1]
    rows, added = _common.rows_of(x), None if residual is None else _common.rows_of(residual)
    num_rows = rows.shape[0] * rows.shape[1]
    if added is not None and added.shape[1] != rows.shape[1]:
        added = added.reshape(*rows.shape[:2], -1)
    plan = choose_plan(_common.device_of(x), "linear", x.dtype, num_rows, sum(counts), _common.dot_precision(x))
    weight_strides = tuple(weight.stride(0) for weight in weights)
    strides = (*rows.stride()[:2], *((0, 0) if added is None else added.stride()[:2]))
    tensors = (rows, tuple(weights), tuple(biases) or None, added, out)
    args = (
        *(*tensors, counts, weight_strides, num_rows, rows.shape[1], width, sum(counts), *strides),
        *(len(counts), *plan.constants(width)),
    )
    read = [rows, *weights, *biases, *([] if added is None else [added])]
    addresses = tuple(tensor.data_ptr() % 16 for tensor in read)
    facts = plan, x.dtype, counts, weight_strides, width, strides, len(biases), added is None, addresses
    tiles = sum(triton.cdiv(count, plan.block_n) for count in counts) * triton.cdiv(num_rows, plan.block_r)
    return Call(_linear_kernel, (tiles, 1, 1), args, plan.compile_options, facts)


def gated_linear_triton(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
) -> Tensor:
    """Launch the kernel; see `specdec_kernels.gated_linear`."""
    if x.dtype == torch.float64:
        return OPS["gated_linear"].reference(x, gate_weight, up_weight, gate_bias, up_bias)
    out = x.new_empty(*x.shape[:-1], gate_weight.shape[0])
    if out.numel() > 0:
        with torch.cuda.device_of(x):
            launch(*gated_linear_call(x, gate_weight, up_weight, gate_bias, up_bias, out))
    return out


def gated_linear_call(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, out: Tensor
) -> Call:
    """Return the launch that writes to ``out``, which is contiguous and not empty."""
    count, width = gate_weight.shape
    rows = _common.rows_of(x)
    num_rows = rows.shape[0] * rows.shape[1]
    plan = choose_plan(_common.device_of(x), "gated_linear", x.dtype, num_rows, count, _common.dot_precision(x))
    strides = (*rows.stride()[:2], gate_weight.stride(0), up_weight.stride(0))
    tensors = (rows, gate_weight, up_weight, gate_bias, up_bias)
    args = (*tensors, out, num_rows, rows.shape[1], width, count, *strides, *plan.constants(width))
    tiles = triton.cdiv(count, plan.block_n) * triton.cdiv(num_rows, plan.block_r)
    addresses = tuple(None if t is None else t.data_ptr() % 16 for t in tensors)
    facts = plan, x.dtype, count, width, strides, addresses
    return Call(_gated_linear_kernel, (tiles, 1, 1), args, plan.compile_options, facts)
