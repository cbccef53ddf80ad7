"""Rows times rows of weight matrices, a block of their width at a time, summed in fp32 in ascending order."""

import triton
import triton.language as tl


@triton.jit
def products(
    x_ptr,
    x_offsets,
    x_ok,
    w_ptr,
    w_offsets,
    width,
    IS_EVEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the (rows of x, rows of w) products of two sets of rows, in fp32."""
    dims = tl.arange(0, BLOCK_C)
    x_ptrs = x_ptr + x_offsets[:, None] + dims[None, :]
    w_ptrs = w_ptr + w_offsets[None, :] + dims[:, None]
    acc = tl.zeros([x_offsets.shape[0], w_offsets.shape[0]], tl.float32)
    for first in range(0, width, BLOCK_C):
        if IS_EVEN:
            x = tl.load(x_ptrs + first, mask=x_ok[:, None], other=0.0)
            w = tl.load(w_ptrs + first)
        else:
            ok = dims < width - first
            x = tl.load(x_ptrs + first, mask=x_ok[:, None] & ok[None, :], other=0.0)
            w = tl.load(w_ptrs + first, mask=ok[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def products_of_two(
    x_ptr,
    x_offsets,
    x_ok,
    w_ptr,
    w_offsets,
    other_ptr,
    other_offsets,
    width,
    IS_EVEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `products` with rows of two matrices; x is read once for both."""
    dims = tl.arange(0, BLOCK_C)
    x_ptrs = x_ptr + x_offsets[:, None] + dims[None, :]
    w_ptrs = w_ptr + w_offsets[None, :] + dims[:, None]
    other_ptrs = other_ptr + other_offsets[None, :] + dims[:, None]
    acc = tl.zeros([x_offsets.shape[0], w_offsets.shape[0]], tl.float32)
    other_acc = tl.zeros([x_offsets.shape[0], w_offsets.shape[0]], tl.float32)
    for first in range(0, width, BLOCK_C):
        if IS_EVEN:
            x = tl.load(x_ptrs + first, mask=x_ok[:, None], other=0.0)
            w = tl.load(w_ptrs + first)
            other = tl.load(other_ptrs + first)
        else:
            ok = dims < width - first
            x = tl.load(x_ptrs + first, mask=x_ok[:, None] & ok[None, :], other=0.0)
            w = tl.load(w_ptrs + first, mask=ok[:, None], other=0.0)
            other = tl.load(other_ptrs + first, mask=ok[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        other_acc = tl.dot(x, other, other_acc, input_precision=PRECISION)
    return acc, other_acc
