"""Random numbers by (seed, position): a part of `ops.verify`, which exports it."""

import torch
from torch import Tensor

from .._ops import ops
from .._registry import define_op
from .._validate import check_device, check_dtype, check_number, check_shape, check_tensor
from ..reference.verify import philox_uniforms_ref

define_op(
    "philox_uniforms(Tensor seed, Tensor position, int count) -> Tensor",
    reference=philox_uniforms_ref,
    fake=lambda seed, position, count: seed.new_empty(seed.shape[0], count, dtype=torch.float32),
    triton="kernels.philox:philox_uniforms_triton",
    native=("cpu",),
)


def philox_uniforms(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Return random numbers that depend on seed and position alone, the same on every device.

    Draw d is word ``d % 4`` of Philox-4x32-10 with key ``(seed low, seed high)`` and counter
    ``(d // 4, 0, position low, position high)``, in words of 32 bits; a word w becomes ``(2 * (w >> 9) + 1) / 2^24``.

    Args:
        seed: ``(B,) int64``, any bit pattern.
        position: ``(B,) int64``, any bit pattern; the absolute position of a token (`decoding.randomness` uses the top
            bits to tell verification and drafters apart).
        count: >= 0; more draws do not change the first ones.

    Returns:
        ``(B, count) fp32``, multiples of 2^-24 from 2^-24 to 1 - 2^-24: never 0, never 1.

    Raises:
        TypeError: not tensors of int64; a count that is no int.
        ValueError: shapes or devices that differ, a negative count.

    Example:
        >>> import torch
        >>> from specdec_kernels import philox_uniforms
        >>> philox_uniforms(torch.tensor([7, 8]), torch.tensor([100, 100]), 2)
        tensor([[0.9870, 0.9329],
                [0.3904, 0.2286]])

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    op = "philox_uniforms"
    check_shape(op, "seed", seed, ("B",))
    check_dtype(op, "seed", seed, (torch.int64,))
    check_tensor(op, "position", position)
    check_shape(op, "position", position, seed.shape)
    check_dtype(op, "position", position, (torch.int64,))
    check_device(op, "position", position, seed.device)
    check_number(op, "count", count, whole=True)
    if count < 0:
        raise ValueError(f"{op}: count must be at least 0, got {count}")
    return ops.philox_uniforms.default(seed, position, count)
