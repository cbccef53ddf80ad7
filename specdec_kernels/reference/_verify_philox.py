"""Philox-4x32-10 in int64 torch ops: the same bits on every device."""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox_uniforms_ref(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Return the first ``count`` draws of each (seed, position) as fp32 in (0, 1) (see `philox_uniforms`)."""
    num_blocks = -(-count // 4)
    block = torch.arange(num_blocks, device=seed.device).expand(seed.shape[0], num_blocks)
    seed, position = seed[:, None].expand_as(block), position[:, None].expand_as(block)
    counter = (block, torch.zeros_like(block), position & _LOW, position >> 32 & _LOW)
    words = torch.stack(philox_4x32(counter, (seed & _LOW, seed >> 32 & _LOW)), dim=-1)
    # 23 bits and a half step: exact in fp32, never 0 and never 1.
    return (((words >> 9) * 2 + 1).float() * 2.0**-24).flatten(1)[:, :count].contiguous()


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encrypt 128-bit counters under 64-bit keys; every tensor holds 32-bit words as int64. Salmon et al. 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a 32 x 32-bit product; int64 wraps, and its bits are the unsigned ones."""
    product = word * multiplier
    return product >> 32 & _LOW, product & _LOW
