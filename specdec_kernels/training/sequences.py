"""Hidden states of whole conversations, of an early layer and of the last one: what a Kangaroo adapter learns from.

position      0      1      2      …      p₋₁     a₀      a₁            (p₋₁: last id of the prompt, a: answer)
exit          e₀     e₁     e₂     …      e       e       e             what the adapter sees
final         f₀     f₁     f₂     …      f       f       f             the backbone's prediction, its target
next id       id₁    id₂    id₃    …      a₀      a₁      a₂
is_answer                                 yes     yes     yes
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..hf.layers import LayerRunner
from .data import is_held_out
from .generate import Conversation
from .hidden import RowStore, by_length, padded_ids


class SequenceBatch(NamedTuple):
    """Some conversations, padded on the right.

    Attributes:
        exit, final: ``(n, L, C)``, anything in the padding.
        next_ids: ``(n, L) int64``; 0 in the padding.
        is_answer: ``(n, L) bool``; the token after this position belongs to the answer.
        is_token: ``(n, L) bool``; not padding.
    """

    exit: Tensor
    final: Tensor
    next_ids: Tensor
    is_answer: Tensor
    is_token: Tensor


class SequenceStates(Protocol):
    """Gives the states of any of its conversations."""

    conversations: list[Conversation]

    def batch(self, indices: Sequence[int]) -> SequenceBatch:
        """Return the states of these conversations (positions in ``conversations``)."""
        ...


class _States:
    """The backbone's states, computed for a batch at a time."""

    def __init__(self, model, exit_layer: int):
        self.model, self.exit_layer = model, exit_layer
        self.device = model.get_input_embeddings().weight.device
        self.runner = LayerRunner(model)

    @torch.no_grad()
    def of(self, batch: list[Conversation]) -> tuple[Tensor, Tensor]:
        """Return exit and final states ``(n, L, C)``; in eval mode the padding on the right changes nothing."""
        tapped: list[Tensor] = []
        with self.runner.tapped(self.exit_layer, tapped):
            final = self.model.base_model(input_ids=padded_ids(batch, self.device), use_cache=False).last_hidden_state
        return tapped[0], final


class LiveStates:
    """Run the backbone for every batch: no disk, and one forward of the backbone for each step of training."""

    def __init__(self, conversations: list[Conversation], model, exit_layer: int):
        self.conversations = by_length(conversations)
        self._states = _States(model, exit_layer)

    def batch(self, indices: Sequence[int]) -> SequenceBatch:
        picked = [self.conversations[i] for i in indices]
        return _batch(picked, *self._states.of(picked))


class StoredStates:
    """States on disk, memory-mapped: ``exit`` and ``final`` side by side in a row for each position."""

    def __init__(self, rows: Tensor, conversations: list[Conversation]):
        self.conversations, self._rows = conversations, rows
        lengths = torch.tensor([_length(c) for c in conversations])
        self._starts = (lengths.cumsum(0) - lengths).tolist()

    def batch(self, indices: Sequence[int]) -> SequenceBatch:
        picked = [self.conversations[i] for i in indices]
        rows = [self._rows[self._starts[i] : self._starts[i] + _length(self.conversations[i])] for i in indices]
        states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return _batch(picked, *states.chunk(2, dim=-1))


def store_states(
    folder: str | Path, conversations: list[Conversation], model, exit_layer: int, *, dtype: torch.dtype,
    max_tokens: int = 8192,
) -> StoredStates:  # fmt: skip
    """Compute the states that are not on disk yet; the size is printed first.

    Args:
        folder: gets one for this exit layer, with ``states.bin`` and ``rows.txt``; an interrupted run goes on.
        conversations: what to compute; of those that were there before, nothing is computed again.
        model: the causal LM.
        exit_layer: how many layers run before the exit.
        dtype: of the rows on disk.
        max_tokens: padded tokens in one batch.
    """
    states = _States(model, exit_layer)

    def rows_of(batch: list[Conversation]) -> Tensor:
        both = torch.cat(states.of(batch), dim=-1)
        return torch.cat([row[: _length(c)] for row, c in zip(both, batch, strict=True)])

    width = 2 * model.get_input_embeddings().weight.shape[1]
    store = RowStore(Path(folder) / f"exit-{exit_layer}", _length, width, dtype)
    return StoredStates(*store.fill(conversations, rows_of, max_tokens))


def split(states: SequenceStates) -> tuple[Tensor, Tensor]:
    """Return the numbers of the conversations to train on, and of those held out."""
    held_out = torch.tensor([is_held_out(c) for c in states.conversations], dtype=torch.bool)
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def _length(conversation: Conversation) -> int:
    return len(conversation.prompt) + len(conversation.answer) - 1


def _batch(picked: list[Conversation], exit_states: Tensor, final: Tensor) -> SequenceBatch:
    columns = torch.arange(final.shape[1])
    starts, ends = (torch.tensor(x)[:, None] for x in ([len(c.prompt) - 1 for c in picked], [*map(_length, picked)]))
    next_ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor((c.prompt + c.answer)[1:]) for c in picked], batch_first=True
    )
    is_token = columns < ends
    return SequenceBatch(exit_states, final, next_ids, (columns >= starts) & is_token, is_token)
