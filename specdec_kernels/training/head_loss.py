"""The loss of Medusa heads on rows of hidden states, wherever these come from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..modules.medusa import MedusaHeads
from .calibrate import row_of_token, states_of_heads
from .hidden import HiddenStates
from .losses import mean_count, medusa_loss
from .processes import Processes


@dataclass(frozen=True)
class HeadOptions:
    """The shape of the heads and their loss.

    Attributes:
        num_heads: ``M``.
        num_layers: residual layers of each head.
        own_projection: each head owns ``(V', C)``; otherwise the frozen ``lm_head`` serves all.
        draft_vocab: rows of the projection: the most frequent tokens of the training answers. 0 = the whole
            vocabulary. Fewer rows train and draft faster; a token outside is never drafted (the output stays exact).
        decay: ``λ`` of the loss.
        soft_targets: learn the backbone's whole distribution at each label's position instead of the label alone.
        root_conditioned: the heads see the pending token, too, see `MedusaHeads`.
        init: folder of heads to go on from; None to begin with what the base model predicts.
    """

    num_heads: int = 4
    num_layers: int = 1
    own_projection: bool = False
    draft_vocab: int = 0
    decay: float = 0.8
    soft_targets: bool = False
    root_conditioned: bool = True
    init: str | None = None


class HeadLoss:
    """Medusa's loss ``Σ_k λ^k · CE_k`` on rows, in the precision of the products.

    Args:
        heads: fp32 on the device to train on.
        options: of the loss.
        dtype: of the matrix products.
    """

    def __init__(self, heads: MedusaHeads, options: HeadOptions, dtype: torch.dtype):
        self.heads, self.options, self.dtype = heads, options, dtype
        self.device = heads.w_res.device
        self.to_row = row_of_token(heads, self.device)
        self.processes = Processes.current()

    def __call__(
        self, states: HiddenStates, rows: Tensor, weight: Tensor, teachers: HiddenStates | None = None,
        teacher_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the loss and each head's cross-entropy ``(M,)``.

        Args:
            states: of the backbone.
            rows: ``(n,)``, which of them.
            weight: ``(V', C)`` of the ``lm_head``, after `MedusaHeads.select_rows`.
            teachers: of the model whose distribution soft targets are, row by row beside ``states``; None: these.
            teacher_weight: its ``(V', C)``; None: ``weight``.
        """
        labels, teacher = states.labels(rows, self.heads.num_heads).to(self.device), None
        if self.options.soft_targets:
            teacher = (teachers or states).teachers(rows, self.heads.num_heads).to(self.device, self.dtype)
            teacher_weight = weight if teacher_weight is None else teacher_weight
        elif self.to_row is not None:
            labels = torch.where(labels < 0, labels, self.to_row[labels.clamp_min(0)])
        mixed = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with mixed:
            hidden = states_of_heads(self.heads, states, rows, self.dtype)
        own = weight if self.heads.w_out is None else self.heads.w_out
        count = mean_count(labels, self.processes)
        return medusa_loss(hidden, own, labels, self.options.decay, teacher, teacher_weight, count)
