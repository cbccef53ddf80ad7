"""Draft nothing: plain decoding through the same loop and the same target."""

import torch
from torch import Tensor

from ...types import Verification
from ..protocols import Draft, TargetOutput


class PlainDrafter:
    """Propose the pending token alone, so that every step emits one token.

    What speculation is to be compared with: the same loop, cache and kernels, without drafts. Also what to use for a
    while when drafts do not pay, for example in a large batch.

    Example:
        >>> PlainDrafter().propose(torch.tensor([7, 8])).ids.tolist()
        [[7], [8]]
    """

    max_nodes = 1

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Start a batch; nothing is kept."""

    def propose(self, pending: Tensor) -> Draft:
        """Return the tree of one node for the pending tokens ``(B,) int64``."""
        return root_alone(pending[:, None])

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Learn nothing."""


def root_alone(ids: Tensor) -> Draft:
    """Return the draft that drafts nothing: ``ids (B, 1)`` are the roots."""
    zero = torch.zeros(1, 1, dtype=torch.int32, device=ids.device)
    return Draft(ids, zero - 1, torch.ones(1, 1, 1, dtype=torch.int64, device=ids.device), zero, max_depth=0)
