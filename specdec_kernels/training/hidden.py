"""The backbone's final hidden states of all answers, computed once and kept on disk.

A frozen backbone gives the same hidden states in every epoch. The row of an answer token is the hidden state *before*
it, the one a drafter sees when that token is pending:

    position      … p₋₁      a₀       a₁       a₂            (a: answer, p₋₁: last id of the prompt)
    row           h(p₋₁)   h(a₀)    h(a₁)
    pending         a₀       a₁       a₂
    head 0 label    a₁       a₂       –
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from .data import is_held_out
from .generate import Conversation
from .processes import Processes

IGNORED = -100  # label of a row whose token does not exist (the answer ends before it)


class HiddenStates:
    """Rows of all answers, memory-mapped.

    Attributes:
        hidden: ``(rows, C)`` in the backbone's dtype.
        pending_ids: ``(rows,) int64``; the answer token that follows each hidden state.
        ends: ``(rows,) int64``; one past the last row of the same answer.
        held_out: ``(rows,) bool``; rows of conversations that are never trained on.
        greedy: ``(rows,) bool``; rows of greedy answers.
        embedding: ``(V, C)``, the backbone's input embeddings; only `roots` needs them.
    """

    def __init__(self, hidden: Tensor, conversations: list[Conversation], embedding: Tensor | None = None):
        lengths = torch.tensor([len(c.answer) for c in conversations])
        self.hidden, self.embedding = hidden, embedding
        self.pending_ids = torch.tensor([t for c in conversations for t in c.answer])
        self.ends = lengths.cumsum(0).repeat_interleave(lengths)
        self.held_out = torch.tensor([is_held_out(c) for c in conversations]).repeat_interleave(lengths)
        self.greedy = torch.tensor([c.greedy for c in conversations]).repeat_interleave(lengths)

    def labels(self, rows: Tensor, num_heads: int) -> Tensor:
        """Return ``(n, M) int64``: head *i*'s label of row *r* is the token *i + 1* after the pending one, or −100."""
        targets = rows[:, None] + 1 + torch.arange(num_heads)
        inside = targets < self.ends[rows][:, None]
        return self.pending_ids[targets.clamp_max(len(self.pending_ids) - 1)].masked_fill(~inside, IGNORED)

    def teachers(self, rows: Tensor, num_heads: int) -> Tensor:
        """Return ``(n, M, C)``: the hidden state from which the backbone predicted each label of `labels`.

        Rows that `labels` ignores get some other state.
        """
        targets = rows[:, None] + 1 + torch.arange(num_heads)
        return self.hidden[targets.clamp_max(len(self.hidden) - 1)]

    def roots(self, rows: Tensor) -> Tensor:
        """Return ``(n, C)``: the embeddings of the pending tokens, for root-conditioned heads."""
        if self.embedding is None:
            raise ValueError("HiddenStates: root-conditioned heads need the embeddings")
        return self.embedding[self.pending_ids[rows].to(self.embedding.device)]

    def rows(self, held_out: bool | None = None) -> Tensor:
        """Return the row numbers of a part, or of both, that have at least one label."""
        wanted = torch.arange(len(self.ends)) + 1 < self.ends
        if held_out is not None:
            wanted &= self.held_out == held_out
        return wanted.nonzero()[:, 0]


def cache_hidden_states(
    folder: str | Path, conversations: list[Conversation], model, *, hidden_size: int, dtype: torch.dtype,
    max_tokens: int = 8192,
) -> HiddenStates:  # fmt: skip
    """Compute the hidden states that are not on disk yet; the size is printed first.

    Args:
        folder: gets ``states.bin`` and ``rows.txt``; an interrupted run goes on after its last whole batch.
        conversations: what to compute; of those that were there before, nothing is computed again.
        model: the causal LM.
        hidden_size: ``C`` of the backbone.
        dtype: of the rows on disk.
        max_tokens: padded tokens in one batch.
    """
    embedding = model.get_input_embeddings().weight.detach()
    device = embedding.device

    def rows_of(batch: list[Conversation]) -> Tensor:
        return answer_rows(model, padded_ids(batch, device), batch)

    store = RowStore(folder, lambda c: len(c.answer), hidden_size, dtype)
    return HiddenStates(*store.fill(conversations, rows_of, max_tokens), embedding)


def answer_rows(model, ids: Tensor, batch: list[Conversation]) -> Tensor:
    """Run the backbone on conversations and return the rows ``(n, C)`` before their answers' tokens. Differentiable.

    Args:
        model: the causal LM.
        ids: of `padded_ids`.
        batch: the conversations.
    """
    # Padding is on the right of causal rows: what comes before it never sees it, so no mask is needed.
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    rows = [h[len(c.prompt) - 1 : len(c.prompt) + len(c.answer) - 1] for h, c in zip(hidden, batch, strict=True)]
    return torch.cat(rows)


def by_length(conversations: list[Conversation]) -> list[Conversation]:
    """Sort so that neighbours can share a batch."""
    return sorted(conversations, key=lambda c: (len(c.prompt) + len(c.answer), c.index))


def padded_ids(batch: list[Conversation], device: torch.device) -> Tensor:
    """Return ``(n, L) int64``: the ids of whole conversations but for the last one, which predicts nothing."""
    ids = [torch.tensor(c.prompt + c.answer[:-1]) for c in batch]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)


class RowStore:
    """Rows of numbers on disk, so many for each conversation; what is missing is computed, and can be interrupted.

    Conversations that come later are added behind those that are there.

    Args:
        folder: gets ``states.bin`` and ``rows.txt``, a line for each conversation whose rows are on disk.
        num_rows: gives how many a conversation has.
        width: numbers of a row.
        dtype: of the numbers.
    """

    def __init__(self, folder: str | Path, num_rows: Callable[[Conversation], int], width: int, dtype: torch.dtype):
        self.folder, self.num_rows, self.width, self.dtype = Path(folder), num_rows, width, dtype
        self.folder.mkdir(parents=True, exist_ok=True)
        self.states, self.lines = self.folder / "states.bin", self.folder / "rows.txt"

    def fill(
        self, conversations: list[Conversation], rows_of: Callable[[list[Conversation]], Tensor], max_tokens: int
    ) -> tuple[Tensor, list[Conversation]]:
        """Compute what is missing, after saying how large it gets; of several processes, the first one does.

        Args:
            conversations: in any order. What is on disk is kept up to the first conversation that is not among them.
            rows_of: returns the rows ``(n, width)`` of a batch.
            max_tokens: padded tokens in one batch.

        Returns:
            All rows, memory-mapped, and the conversations in their order.
        """
        processes = Processes.current()
        if processes.is_first:
            self._complete(conversations, rows_of, max_tokens)
        processes.wait()
        stored = self._stored(conversations)
        total = sum(map(self.num_rows, stored))
        rows = torch.from_file(str(self.states), shared=False, size=total * self.width, dtype=self.dtype)
        return rows.view(total, self.width), stored

    def _complete(self, conversations: list[Conversation], rows_of, max_tokens: int) -> None:
        total, row_bytes = sum(map(self.num_rows, conversations)), self.width * self.dtype.itemsize
        size = f"{total:,} rows × {self.width} × {self.dtype.itemsize} bytes = {total * row_bytes / 1e6:,.1f} MB"
        print(f"hidden states: {size} in {self.states}", flush=True)
        stored = self._stored(conversations)
        kept = set(stored)
        missing = by_length([c for c in conversations if c not in kept])
        if not missing:
            return
        num_stored = sum(map(self.num_rows, stored))
        self.lines.write_text("".join(map(self._line, stored)))
        with open(self.states, "r+b" if self.states.exists() else "w+b") as file:
            file.truncate(num_stored * row_bytes)
            file.seek(0, os.SEEK_END)
            with tqdm(total=total, initial=num_stored, unit="tok", desc="hidden states") as bar:
                self._compute(file, bar, missing, rows_of, max_tokens)

    @torch.inference_mode()
    def _compute(self, file, bar, missing: list[Conversation], rows_of, max_tokens: int) -> None:
        start = 0
        while start < len(missing):
            batch = _next_batch(missing, start, max_tokens)
            block = rows_of(batch).to("cpu", self.dtype).contiguous()
            file.write(block.view(torch.uint8).numpy().tobytes())
            file.flush()
            # Only now do they count; what an interruption leaves behind them is cut off.
            with open(self.lines, "a", encoding="utf-8") as lines:
                lines.write("".join(map(self._line, batch)))
            bar.update(len(block))
            start += len(batch)

    def _line(self, conversation: Conversation) -> str:
        c = conversation
        ids = torch.tensor([c.index, len(c.prompt), *c.prompt, *c.answer])
        return f"{hashlib.sha256(f'{self.width} {self.dtype}'.encode() + ids.numpy().tobytes()).hexdigest()[:32]}\n"

    def _stored(self, conversations: list[Conversation]) -> list[Conversation]:
        """Return the conversations whose rows are on disk, in order."""
        by_line = {self._line(c): c for c in conversations}
        lines = self.lines.read_text(encoding="utf-8").splitlines(keepends=True) if self.lines.exists() else []
        stored = []
        for line in lines:
            # Taken out, so that a line that stands there twice ends what is kept.
            conversation = by_line.pop(line, None)
            if conversation is None:
                break
            stored.append(conversation)
        return stored


def _next_batch(conversations: list[Conversation], start: int, max_tokens: int) -> list[Conversation]:
    """Take as many as fit; sorted by length, so the last one taken is the longest."""
    stop = start + 1
    while stop < len(conversations):
        longest = len(conversations[stop].prompt) + len(conversations[stop].answer)
        if longest * (stop + 1 - start) > max_tokens:
            break
        stop += 1
    return conversations[start:stop]
