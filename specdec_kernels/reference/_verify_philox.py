"""Philox-4x32-10 in int64 torch ops: the same bits on every device."""

from torch import Tensor

LOW_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


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
        k0, k1 = (k0 + _KEY_STEPS[0]) & LOW_WORD, (k1 + _KEY_STEPS[1]) & LOW_WORD
    return c0, c1, c2, c3


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a 32 x 32-bit product; int64 wraps, and its bits are the unsigned ones."""
    product = word * multiplier
    return product >> 32 & LOW_WORD, product & LOW_WORD
