"""Philox-4x32-10 in Triton: uniforms by (seed, position), the bits of every other back end."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64  # draws are made in blocks of four; 256 of them serve a tree of any usual size in one program


@triton.jit(do_not_specialize=["stride_seed", "stride_position", "count"])
def _philox_uniforms_kernel(seed_ptr, position_ptr, out_ptr, stride_seed, stride_position, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row * stride_position)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zeros = block * 0
    low, high = zeros + position.to(tl.int32), zeros + (position >> 32).to(tl.int32)
    words = tl.philox(tl.load(seed_ptr + row * stride_seed), block, zeros, low, high)
    for i in tl.static_range(4):
        draw = block * 4 + i
        # 23 bits and a half step: exact in fp32, never 0 and never 1.
        uniform = ((words[i] >> 9) * 2 + 1).to(tl.float32) * 5.9604644775390625e-08
        tl.store(out_ptr + row * count + draw, uniform, mask=draw < count)


def philox_uniforms_triton(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Launch the kernel; see `specdec_kernels.philox_uniforms`."""
    out = seed.new_empty(seed.shape[0], count, dtype=torch.float32)
    if out.numel() > 0:
        with torch.cuda.device_of(seed):
            _philox_uniforms_kernel[(seed.shape[0], triton.cdiv(count, 4 * _BLOCK))](
                seed,
                position,
                out,
                seed.stride(0),
                position.stride(0),
                count,
                _BLOCK,
                num_warps=1,
                enable_fp_fusion=True,
            )
    return out
