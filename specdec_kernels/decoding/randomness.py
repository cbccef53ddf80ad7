"""The only place that assigns random draws.

A draw is named by (seed, stream, position, index) and by nothing else, so the tokens of a request do not depend on its
slot, on the batch, on its neighbours' drafts, or on the step at which it joined.

- *seed*: of the row, ``(B,) int64``. `row_seeds` derives them from one number.
- *position*: the absolute position of the **root**, the pending token that the step starts from: ``prefix_len``, or
  ``prompt_len − 1`` for the first token, which is chosen after the prompt. Every step emits a token, so a position
  starts one step only and no draw is used twice.
- *stream*: who draws. It occupies the top bits of the position word of the generator, so streams never meet:

  | stream | used by | index |
  |---|---|---|
  | 0 | verification, `uniforms_at` | 0: the final draw; *i* ≥ 1: whether node *i* is accepted |
  | 1 | the drafter, `draft_uniforms_at` | *i*: the drafter's own, by convention the draw of node *i* |

The drafter's draws are named by the root's position too, not by that of the drafted token: a position that was drafted
and rejected is drafted again in the next step, and then needs fresh numbers.
"""

import torch
from torch import Tensor

from .._validate import check_range
from ..ops.verify import philox_uniforms

_STREAM_SHIFT = 48
_DRAFT_STREAM = 1
_MASK_64 = 2**64 - 1


def uniforms_at(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return the uniforms that verification uses in the step whose root is at ``positions``.

    Args:
        seeds: ``(B,) int64``, one for each row.
        positions: ``(B,) int32 or int64``, absolute position of each row's root, below 2^48 (not checked).
        count: the number of nodes T.

    Returns:
        ``(B, count) fp32`` in (0, 1). A larger count gives the same numbers and more.
    """
    return philox_uniforms(seeds, positions.to(torch.int64), count)


def draft_uniforms_at(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return the uniforms that a drafter may use in the step whose root is at ``positions``.

    Independent of those of `uniforms_at`: a draft drawn with the number that later judges it would be biased.
    Arguments and result as there; which index serves what is the drafter's choice.
    """
    return philox_uniforms(seeds, positions.to(torch.int64) + (_DRAFT_STREAM << _STREAM_SHIFT), count)


def row_seeds(seed: int, num_rows: int, device: torch.device | str | None = None) -> Tensor:
    """Derive a seed for each row of a batch from one seed; row *r*'s does not depend on ``num_rows``.

    Args:
        seed: −2^63 … 2^64 − 1; negative ones count as their 64-bit pattern, like `torch.manual_seed`.
        num_rows: B, at least 0.
        device: of the result.

    Returns:
        ``(num_rows,) int64``, all different.

    Example:
        >>> row_seeds(7, 2).tolist() == row_seeds(7, 5).tolist()[:2]
        True
    """
    check_range("row_seeds", "seed", seed, -(2**63), _MASK_64)
    check_range("row_seeds", "num_rows", num_rows, 0, 2**31)
    words = [_mix(seed + (row + 1) * 0x9E3779B97F4A7C15 & _MASK_64) for row in range(num_rows)]
    signed = [word - 2**64 if word >= 2**63 else word for word in words]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def _mix(word: int) -> int:
    """Scramble 64 bits one to one (the finisher of SplitMix64, Steele et al. 2014)."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK_64
    return word ^ word >> 31
