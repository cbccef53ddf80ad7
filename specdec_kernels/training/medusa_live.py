"""Train Medusa heads while the backbone runs: frozen, instead of states on disk, or tuned with them (Medusa-2)."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from ..modules.medusa import MedusaHeads
from .backbone import Backbone, JointOptions
from .calibrate import MAX_RANK, RankCounter, measure_accuracies
from .data import is_held_out
from .generate import Conversation
from .head_loss import HeadLoss, HeadOptions
from .hidden import HiddenStates, by_length
from .losses import CHUNK_ROWS, linear_cross_entropy, mean_count
from .processes import Processes
from .trainer import Trainer, TrainerOptions


class LiveLoss:
    """The loss of some conversations: of the heads alone, or ``L_LM + λ₀ · L_medusa``.

    Args:
        heads: fp32.
        backbone: frozen, or tuned by ``joint``.
        conversations: which ones can be asked for, by position.
        options: of the heads.
        joint: of Medusa-2; None for the heads alone.
    """

    def __init__(
        self, heads: MedusaHeads, backbone: Backbone, conversations: Sequence[Conversation], options: HeadOptions,
        joint: JointOptions | None,
    ):  # fmt: skip
        self.backbone, self.conversations, self.joint = backbone, conversations, joint
        self.head_loss, self.select_rows = HeadLoss(heads, options, backbone.dtype), heads.select_rows
        self.needs_original = joint is not None and (joint.self_distillation or options.soft_targets)
        self.processes = Processes.current()

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and its parts: those of the heads, after ``L_LM`` when there is one."""
        batch = [self.conversations[i] for i in indices.tolist()]
        states = self.backbone.states(batch)
        original = self.backbone.original_states(batch) if self.needs_original else states
        rows = torch.arange(len(states.hidden))
        loss, parts = self.head_loss(
            states, rows, self.select_rows(self.backbone.weight), original,
            self.select_rows(self.backbone.original_weight),
        )  # fmt: skip
        if self.joint is None:
            return loss, parts
        language_loss = self._language_loss(states, original, self.joint.self_distillation)
        return language_loss + self.joint.weight * loss, torch.cat([language_loss.detach()[None], parts])

    def _language_loss(self, states: HiddenStates, original: HiddenStates, self_distillation: bool) -> Tensor:
        dtype, weight = self.backbone.dtype, self.backbone.weight
        labels = states.pending_ids.to(self.backbone.device)
        count = mean_count(labels, self.processes)
        x = states.hidden.to(dtype)
        if not self_distillation:
            return linear_cross_entropy(x, weight, labels, num_labels=count)
        teacher, teacher_weight = original.hidden.to(dtype), self.backbone.original_weight
        crossed = linear_cross_entropy(x, weight, labels, teacher, teacher_weight, count)
        with torch.no_grad():  # its own cross-entropy is the entropy
            entropy = linear_cross_entropy(teacher, teacher_weight, labels, teacher, teacher_weight, count)
        return crossed - entropy


def train_live(
    heads: MedusaHeads, backbone: Backbone, conversations: Sequence[Conversation], folder: str | Path,
    options: HeadOptions, trainer_options: TrainerOptions, joint: JointOptions | None = None, *, num_probes: int = 32,
) -> Trainer:  # fmt: skip
    """Train on the conversations that are not held out; return the trainer, which has run.

    Args:
        heads: fp32 on the device to train on; changed in place.
        backbone: tuned, too, if it was made with ``joint``.
        conversations: all of them.
        folder: of checkpoints and the curve.
        options: of the heads.
        trainer_options: how; ``batch_size`` counts conversations.
        joint: as the backbone's.
        num_probes: held-out conversations measured at each checkpoint, for the curve.
    """
    conversations = by_length(list(conversations))
    training = torch.tensor([i for i, c in enumerate(conversations) if not is_held_out(c)])
    held_out = [c for c in conversations if is_held_out(c)]
    chosen = torch.linspace(0, max(0, len(held_out) - 1), min(num_probes, len(held_out))).long().tolist()

    def evaluate() -> dict:
        counter, kept = measure_live(heads, backbone, [held_out[i] for i in chosen], 1)
        found = {"held_out_top1": [row[0] for row in counter.accuracies()]}
        return found if joint is None else {**found, "same_as_original": [round(kept, 6)]}

    trainer = Trainer(
        nn.ModuleDict({"heads": heads, "backbone": backbone.module}),
        LiveLoss(heads, backbone, conversations, options, joint),
        training, trainer_options, folder, evaluate=evaluate,
        task={**asdict(options), "joint": None if joint is None else asdict(joint)},
        parts=() if joint is None else ["LM", *(f"head {i + 1}" for i in range(heads.num_heads))],
        rate_of=None if joint is None else lambda name: joint.head_rate if name.startswith("heads.") else 1.0,
    )  # fmt: skip
    trainer.run()
    return trainer


@torch.no_grad()
def measure_live(
    heads: MedusaHeads, backbone: Backbone, conversations: Sequence[Conversation], max_rank: int = MAX_RANK,
    batch_size: int = 8,
) -> tuple[RankCounter, float]:  # fmt: skip
    """Measure heads on a running backbone.

    Args:
        heads: in any dtype.
        backbone: frozen or tuned.
        conversations: what to measure on.
        max_rank: candidates to count.
        batch_size: conversations at a time.

    Returns:
        The counts of `measure_accuracies`, and after how many of the answers' tokens (a share) the most probable token
        is still the original's.
    """
    weight = backbone.weight.detach().to(backbone.dtype)
    shared = heads.select_rows(weight) if heads.w_out is None else None
    num_rows = heads.num_rows or weight.shape[0]
    counter, num_kept, num_all = RankCounter(heads.num_heads, min(max_rank, num_rows)), 0, 0
    for start in range(0, len(conversations), batch_size):
        batch = list(conversations[start : start + batch_size])
        states = backbone.states(batch)
        measure_accuracies(heads, shared, states, states.rows(), max_rank, counter)
        num_all += len(states.hidden)
        if backbone.is_tuned:
            original = backbone.original_states(batch).hidden
            num_kept += _same_choices(states.hidden.to(weight.dtype), weight, original, backbone.original_weight)
    return counter, num_kept / num_all if backbone.is_tuned and num_all else 1.0


def _same_choices(x: Tensor, weight: Tensor, original: Tensor, original_weight: Tensor) -> int:
    chunk = CHUNK_ROWS.get(x.device.type, 1024)
    return sum(
        int(((ours @ weight.T).argmax(-1) == (theirs @ original_weight.T).argmax(-1)).sum())
        for ours, theirs in zip(x.split(chunk), original.split(chunk), strict=True)
    )
