"""When a row stops drafting: a threshold on the probability of what it drafts, fixed or led by the acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """The threshold of each row, ``(B,) fp32``, and the acceptance rate that moves it."""

    def __init__(self, rule: ExitRule, batch_size: int, device: torch.device):
        self.rule = rule
        self.threshold = torch.full((batch_size,), rule.threshold, device=device)
        # The first step replaces half of it: a start at the target moves nothing by itself.
        self.rate = torch.full((batch_size,), rule.target_rate or 0.0, device=device)

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
