"""When a row stops drafting: a threshold on the probability of what it drafts, fixed or led by the acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree.mask import unpack_mask
from ..types import Verification
from .protocols import Draft


@dataclass(frozen=True)
class ExitRule:
    """When a row stops drafting: behind a token that was less probable than a threshold, which follows the acceptance.

    After a step in which *a* of *d* drafts were accepted (Zhang et al. 2023, arXiv 2309.08168, section 3.3)::

        rate      ← rate_decay · rate + (1 − rate_decay) · a/d
        wish      = threshold + step   if rate ≤ target_rate,   threshold − step   otherwise
        threshold ← threshold_decay · threshold + (1 − threshold_decay) · wish

    Attributes:
        threshold: the first one, a probability. 0 never stops.
        target_rate: the share of drafts that should be accepted; None keeps the threshold as it is.
        step, rate_decay, threshold_decay: as above.
    """

    threshold: float = 0.6
    target_rate: float | None = 0.9
    step: float = 0.01
    rate_decay: float = 0.5
    threshold_decay: float = 0.9

    def begin(self, batch_size: int, device: torch.device) -> "RowExits":
        """Return the state of a batch."""
        return RowExits(self, batch_size, device)


class RowExits:
    """The threshold of each row, ``(B,) fp32``, and the acceptance rate that moves it.

    A drafter hands its draft to `watch` before others may merge theirs into it, and the verification to `settle`: so it
    is led by its own drafts alone, whatever tree they were verified in.
    """

    def __init__(self, rule: ExitRule, batch_size: int, device: torch.device):
        self.rule = rule
        self.threshold = torch.full((batch_size,), rule.threshold, device=device)
        # The first step replaces half of it: a start at the target moves nothing by itself.
        self.rate = torch.full((batch_size,), rule.target_rate or 0.0, device=device)
        self._watched: Draft | None = None

    def watch(self, draft: Draft) -> Draft:
        """Remember the drafter's proposal until it was verified, and return it."""
        self._watched = draft
        return draft

    def settle(self, verification: Verification, active: Tensor) -> None:
        """Learn from what was emitted how much of the watched draft was right; nothing when none was proposed."""
        draft, self._watched = self._watched, None
        if draft is not None and self.rule.target_rate is not None:
            self.observe(*count_levels(draft, verification), active)

    def observe(self, num_drafts: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        """Learn how many drafts of each row were accepted; rows that ended or drafted nothing stay as they are."""
        rule = self.rule
        if rule.target_rate is None:
            return
        learns = active & (num_drafts > 0)
        share = num_accepted / num_drafts.clamp_min(1)
        self.rate = torch.where(learns, rule.rate_decay * self.rate + (1 - rule.rate_decay) * share, self.rate)
        wish = self.threshold + torch.where(self.rate <= rule.target_rate, rule.step, -rule.step)
        moved = rule.threshold_decay * self.threshold + (1 - rule.threshold_decay) * wish
        self.threshold = torch.where(learns, moved.clamp(0, 1), self.threshold)


def count_levels(draft: Draft, verification: Verification) -> tuple[Tensor, Tensor]:
    """Count the levels that each row drafted, and those at which a path of the draft was accepted.

    The verified tree may have been another one, into which the draft was merged: a path counts by its tokens. One that
    found no room there was not accepted.

    Returns:
        Two tensors ``(B,)``; of a tree at most one token a level can be accepted.
    """
    ids, depths, accepted = draft.ids, draft.depths.long(), verification.num_accepted[:, None]
    nodes = torch.arange(ids.shape[1], device=ids.device)
    used = (nodes < ids.shape[1])[None] if draft.num_nodes is None else nodes < draft.num_nodes[:, None]
    at = (depths - 1).clamp(0, verification.output_ids.shape[1] - 1).expand_as(ids)
    is_emitted = (depths <= accepted) & (verification.output_ids.gather(1, at) == ids) | (depths == 0)
    is_path = ~(unpack_mask(draft.tree_mask, ids.shape[1]) & ~is_emitted[:, None]).any(-1)
    return (depths * used).amax(1).expand(len(ids)), (depths * (is_path & used)).amax(1)
