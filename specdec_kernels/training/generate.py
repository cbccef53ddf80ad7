"""Let a model write its own training data: many conversations at once, on a few cores.

A fixed number of slots decode together, one token a step. A slot whose conversation ends takes the next job at once,
so no step is spent on finished rows. A slot holds forced tokens (the template between the turns) or samples freely.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hf.target import HFTarget

SAMPLING_TOP_K = 50  # what `generate(do_sample=True)` keeps when nothing is said


@dataclass(frozen=True)
class Template:
    """The fixed token ids of a chat template around one user turn.

    Attributes:
        before_user: everything up to where the user's text starts.
        after_user: from the end of the user's text to where the answer starts; nothing for a model without turns.
        stop: ids that end a turn.
    """

    before_user: tuple[int, ...]
    after_user: tuple[int, ...]
    stop: frozenset[int]


@dataclass(frozen=True)
class Job:
    """One conversation to generate.

    Attributes:
        index: its number; with the seed it fixes the random draws.
        start: ids to begin with.
        writes_user_turn: whether ``start`` ends inside a user turn, which the model finishes itself.
        greedy: whether the answer is greedy.
    """

    index: int
    start: tuple[int, ...]
    writes_user_turn: bool
    greedy: bool


@dataclass(frozen=True)
class Conversation:
    """A finished conversation: the ids before the answer and the answer's own, its stop id included."""

    index: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    greedy: bool


@dataclass(frozen=True)
class Limits:
    """Lengths and temperatures of the generated turns."""

    user_len: int = 128
    answer_len: int = 256
    user_temperature: float = 1.0
    answer_temperature: float = 0.7


class _Slot:
    """One row's conversation in progress."""

    def __init__(self, job: Job, seed: int):
        self.job = job
        self.ids = list(job.start)
        self.in_user_turn = job.writes_user_turn
        self.turn_start = len(self.ids)
        self.forced: deque[int] = deque()
        self.generator = torch.Generator().manual_seed((seed * 1_000_003 + job.index) % 2**63)

    def temperature(self, limits: Limits) -> float:
        if self.in_user_turn:
            return limits.user_temperature
        return 0.0 if self.job.greedy else limits.answer_temperature

    def take(self, token: int, template: Template, limits: Limits) -> bool:
        """Append the next token (a forced one if there is one); return whether the conversation is complete."""
        if self.forced:
            self.ids.append(self.forced.popleft())
            if not self.forced:
                self.turn_start = len(self.ids)
            return False
        turn_len = len(self.ids) - self.turn_start
        if self.in_user_turn:
            if token in template.stop or turn_len >= limits.user_len:
                self.in_user_turn = False
                self.forced.extend(template.after_user)
                if self.forced:
                    return self.take(token, template, limits)
                # Nothing stands between the turns: this place is drawn again, as the answer's first.
                self.turn_start = len(self.ids)
                return False
            self.ids.append(token)
            return False
        self.ids.append(token)
        return token in template.stop or turn_len + 1 >= limits.answer_len

    def finish(self) -> Conversation:
        prompt, answer = self.ids[: self.turn_start], self.ids[self.turn_start :]
        return Conversation(self.job.index, tuple(prompt), tuple(answer), self.job.greedy)


def sample_rows(logits: Tensor, temperatures: list[float], uniforms: Tensor) -> list[int]:
    """Draw one id for each row of ``logits (B, V)``: the argmax at temperature 0, else from the scaled top 50.

    ``uniforms (B,)`` in [0, 1) decides row by row, so a row's draw does not depend on the other rows.
    """
    values, ids = logits.float().topk(min(SAMPLING_TOP_K, logits.shape[-1]), dim=-1)
    scale = torch.tensor(temperatures, device=logits.device)
    probs = (values / scale.clamp_min(1e-6)[:, None]).softmax(-1)
    picks = (probs.cumsum(-1) <= uniforms.to(logits.device)[:, None]).sum(-1).clamp_max(ids.shape[1] - 1)
    picks = torch.where(scale > 0, picks, 0)
    return ids.gather(1, picks[:, None])[:, 0].tolist()


class BatchedWriter:
    """Decode many conversations at once with a causal LM.

    Args:
        model: a causal LM of a supported family in eval mode (see `HFTarget`).
        template: ids around the user turn.
        num_slots: conversations decoded together.
        limits: lengths and temperatures.
        max_start: longest ``Job.start`` that will come (the cache is allocated once).
        seed: of all draws.

    Raises:
        NotImplementedError: the model is not supported; says why.
    """

    def __init__(self, model, template: Template, *, num_slots: int, limits: Limits, max_start: int, seed: int = 0):
        self.template, self.limits, self.seed = template, limits, seed
        self.device = model.get_input_embeddings().weight.device
        longest = max_start + limits.user_len + len(template.after_user) + limits.answer_len
        # A row is refilled while others are near their end.
        self.target = HFTarget(model, num_slots, longest + max_start)
        self.slots: list[_Slot | None] = [None] * num_slots
        self.is_running: list[bool] = []
        self.tree_mask = torch.ones(1, 1, 1, dtype=torch.int64, device=self.device)
        self.depths = torch.zeros(1, 1, dtype=torch.int32, device=self.device)

    @torch.inference_mode()
    def write(self, jobs: Iterable[Job]) -> Iterator[Conversation]:
        """Yield the conversations as they finish (not in job order)."""
        pending = iter(jobs)
        for row in range(len(self.slots)):
            self._refill(row, pending)
        while any(self.slots):
            for row, token in enumerate(self._sample(self._decode())):
                slot = self.slots[row]
                if slot is not None and slot.take(token, self.template, self.limits):
                    yield slot.finish()
                    self._refill(row, pending)

    def _refill(self, row: int, pending: Iterator[Job]) -> None:
        """Put the next job into a slot and run all but the last id of its start; that one goes with the next step."""
        job = next(pending, None)
        self.slots[row] = None if job is None else _Slot(job, self.seed)
        if job is not None:
            self.target.refill(row, torch.tensor(job.start[:-1], dtype=torch.int64, device=self.device))

    def _decode(self) -> Tensor:
        """Run the last token of every slot, not the empty ones; return logits ``(B, V)``."""
        running = [slot is not None for slot in self.slots]
        if running != self.is_running:
            self.target.run_only([row for row, is_running in enumerate(running) if is_running])
            self.is_running = running
        # A slot whose last place is drawn again runs its last id again.
        lengths = [len(slot.ids) - 1 if slot else 0 for slot in self.slots]
        self.target.truncate(torch.tensor(lengths, dtype=torch.int32, device=self.device))
        ids = torch.tensor([[slot.ids[-1] if slot else 0] for slot in self.slots], device=self.device)
        logits = self.target.forward(ids, self.tree_mask, self.depths).logits[:, -1]
        no_drafts = torch.zeros(len(running), dtype=torch.int32, device=self.device)
        self.target.commit(no_drafts[:, None][:, :0], no_drafts, torch.tensor(running, device=self.device))
        return logits

    def _sample(self, logits: Tensor) -> list[int]:
        temperatures = [s.temperature(self.limits) if s else 0.0 for s in self.slots]
        uniforms = torch.tensor([float(torch.rand((), generator=s.generator)) if s else 0.0 for s in self.slots])
        return sample_rows(logits, temperatures, uniforms)
