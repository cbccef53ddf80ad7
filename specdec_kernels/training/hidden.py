"""The backbone's final hidden states of all answers, computed once and kept on disk.

A frozen backbone gives the same hidden states in every epoch. The row of an answer token is the hidden state *before*
it, the one a drafter sees when that token is pending:

    position      … p₋₁      a₀       a₁       a₂            (a: answer, p₋₁: last id of the prompt)
    row           h(p₋₁)   h(a₀)    h(a₁)
    pending         a₀       a₁       a₂
    head 0 label    a₁       a₂       –
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from .data import is_held_out
from .generate import Conversation

IGNORED = -100  # label of a row whose token does not exist (the answer ends before it)


class HiddenStates:
    """Rows of all answers, memory-mapped.

    Attributes:
        hidden: ``(rows, C)`` in the backbone's dtype.
        pending_ids: ``(rows,) int64``; the answer token that follows each hidden state.
        ends: ``(rows,) int64``; one past the last row of the same answer.
        held_out: ``(rows,) bool``; rows of conversations that are never trained on.
        greedy: ``(rows,) bool``; rows of greedy answers.
    """

    def __init__(self, hidden: Tensor, conversations: list[Conversation]):
        lengths = torch.tensor([len(c.answer) for c in conversations])
        self.hidden = hidden
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

    def rows(self, held_out: bool) -> Tensor:
        """Return the row numbers of a part that have at least one label."""
        has_label = torch.arange(len(self.ends)) + 1 < self.ends
        return (has_label & (self.held_out == held_out)).nonzero()[:, 0]


def cache_hidden_states(
    folder: str | Path, conversations: list[Conversation], model, *, hidden_size: int, dtype: torch.dtype,
    max_tokens: int = 8192,
) -> HiddenStates:  # fmt: skip
    """Compute the hidden states that are not on disk yet; the size is printed first.

    Args:
        folder: gets ``states.bin`` and ``progress.json``; an interrupted run goes on after its last whole batch.
        conversations: what to compute; another set than before starts over.
        model: the causal LM.
        hidden_size: ``C`` of the backbone.
        dtype: of the rows on disk.
        max_tokens: padded tokens in one batch.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    conversations = sorted(conversations, key=lambda c: (len(c.prompt) + len(c.answer), c.index))
    num_rows = sum(len(c.answer) for c in conversations)
    row_bytes = hidden_size * dtype.itemsize
    states = folder / "states.bin"
    size = f"{num_rows:,} rows × {hidden_size} × {dtype.itemsize} bytes = {num_rows * row_bytes / 1e6:,.1f} MB"
    print(f"hidden states: {size} in {states}", flush=True)
    progress = _Progress(folder / "progress.json", _fingerprint(conversations, hidden_size, dtype))
    if progress.conversations < len(conversations):
        with open(states, "r+b" if states.exists() else "w+b") as file:
            file.truncate(progress.rows * row_bytes)
            file.seek(0, os.SEEK_END)
            _compute(file, progress, conversations, model, dtype, max_tokens)
    hidden = torch.from_file(str(states), shared=False, size=num_rows * hidden_size, dtype=dtype)
    return HiddenStates(hidden.view(num_rows, hidden_size), conversations)


class _Progress:
    """How many conversations and rows are on disk, for one set of conversations."""

    def __init__(self, path: Path, fingerprint: str):
        self.path, self.fingerprint = path, fingerprint
        self.conversations = self.rows = 0
        if path.exists():
            found = json.loads(path.read_text())
            if found["fingerprint"] == fingerprint:
                self.conversations, self.rows = found["conversations"], found["rows"]

    def add(self, conversations: int, rows: int) -> None:
        self.conversations += conversations
        self.rows += rows
        entry = {"fingerprint": self.fingerprint, "conversations": self.conversations, "rows": self.rows}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(entry) + "\n")
        os.replace(temporary, self.path)


def _fingerprint(conversations: list[Conversation], hidden_size: int, dtype: torch.dtype) -> str:
    digest = hashlib.sha256(f"{hidden_size} {dtype}".encode())
    for c in conversations:
        digest.update(torch.tensor([c.index, len(c.prompt), *c.prompt, *c.answer]).numpy().tobytes())
    return digest.hexdigest()


@torch.inference_mode()
def _compute(file, progress: _Progress, conversations, model, dtype: torch.dtype, max_tokens: int) -> None:
    device = model.get_input_embeddings().weight.device
    total = sum(len(c.answer) for c in conversations)
    with tqdm(total=total, initial=progress.rows, unit="tok", desc="hidden states") as bar:
        while progress.conversations < len(conversations):
            batch = _next_batch(conversations, progress.conversations, max_tokens)
            ids = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(c.prompt + c.answer[:-1]) for c in batch], batch_first=True
            )
            # Padding is on the right of causal rows: what comes before it never sees it, so no mask is needed.
            hidden = model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
            rows = [
                h[len(c.prompt) - 1 : len(c.prompt) + len(c.answer) - 1] for h, c in zip(hidden, batch, strict=True)
            ]
            block = torch.cat(rows).to("cpu", dtype).contiguous()
            file.write(block.view(torch.uint8).numpy().tobytes())
            file.flush()
            progress.add(len(batch), len(block))
            bar.update(len(block))


def _next_batch(conversations: list[Conversation], start: int, max_tokens: int) -> list[Conversation]:
    """Take as many as fit; sorted by length, so the last one taken is the longest."""
    stop = start + 1
    while stop < len(conversations):
        longest = len(conversations[stop].prompt) + len(conversations[stop].answer)
        if longest * (stop + 1 - start) > max_tokens:
            break
        stop += 1
    return conversations[start:stop]
