"""A speculative batch seen as ``generate`` sees one: all rows side by side, one token at a time."""

from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from ..decoding.loop import Step


class Transcript:
    """Put the tokens of the rows, which advance at their own pace, into common columns, and end rows as criteria say.

    A column is complete when every row that goes on has a token for it; then stopping criteria and streamer get it as
    ``generate`` would give it to them, with padding in the rows that have ended. So a criterion may look at the whole
    batch, and may keep a state. A row that is ahead of the others can turn out to have ended some tokens ago; those
    tokens are dropped. With one row nothing is ever ahead.

    Args:
        input_ids: ``(B, P)``, the prompts as ``generate`` has them.
        criteria: as ``generate`` prepared them. Those for the length and for EOS ids are not called: the loop applies
            them while it decodes.
        pad_id: for ended rows.
        streamer: gets each column ``(B,)`` on the CPU.
        keep_scores, keep_logits: collect processed and raw logits.
    """

    def __init__(
        self,
        input_ids: Tensor,
        criteria: StoppingCriteriaList,
        pad_id: int,
        *,
        streamer: Any = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ):
        self._input_ids, self._so_far, self._pad_id, self._streamer = input_ids, input_ids, pad_id, streamer
        self._criteria = StoppingCriteriaList(
            criterion for criterion in criteria if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        # As in `generate`: without EOS, a row that a criterion has ended goes on until all have ended.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        num_rows = len(input_ids)
        self._rows: list[list[int]] = [[] for _ in range(num_rows)]
        self._has_ended = [False] * num_rows
        self._lengths: list[int | None] = [None] * num_rows
        self._num_columns = 0
        self._scores = _Columns(num_rows) if keep_scores else None
        self._logits = _Columns(num_rows) if keep_logits else None

    def __call__(self, step: Step) -> list[int | None]:
        """Take a step's tokens; return the cuts of `specdec_kernels.decoding.loop.StopRule`."""
        before = [len(row) for row in self._rows]
        for row, tokens in zip(self._rows, step.tokens, strict=True):
            row += tokens
        if self._scores is not None:
            processed = step.raw_logits.float() if step.processed_logits is None else step.processed_logits
            self._scores.take(processed, step.tokens)
        if self._logits is not None:
            self._logits.take(step.raw_logits.float(), step.tokens)
        while self._is_column_complete():
            self._add_column(step.finished)
        return [
            None if length is None else max(0, length - count)
            for length, count in zip(self._lengths, before, strict=True)
        ]

    def _is_column_complete(self) -> bool:
        waiting = [not (ended and self._pads) for ended in self._has_ended]
        return not all(self._has_ended) and all(
            len(row) > self._num_columns for row, waits in zip(self._rows, waiting, strict=True) if waits
        )

    def _add_column(self, finished: list[bool]) -> None:
        n = self._num_columns
        padded = [ended and self._pads for ended in self._has_ended]
        column = [self._pad_id if pad else row[n] for row, pad in zip(self._rows, padded, strict=True)]
        self._num_columns += 1
        for collected in (self._scores, self._logits):
            if collected is not None:
                collected.add_column(padded, self._pad_id)
        for row, done in enumerate(self._ask_criteria(column)):
            if done or (finished[row] and len(self._rows[row]) == n + 1):
                self._has_ended[row] = True
                self._lengths[row] = self._lengths[row] or (n + 1 if self._pads else None)
        if all(self._has_ended) and not self._pads:
            self._lengths = [n + 1] * len(self._rows)
        if self._streamer is not None:
            self._streamer.put(torch.tensor(column))

    def _ask_criteria(self, column: list[int]) -> list[bool]:
        if not self._criteria:
            return [False] * len(column)
        new = torch.tensor(column, dtype=self._so_far.dtype, device=self._so_far.device)
        self._so_far = torch.cat([self._so_far, new[:, None]], dim=1)
        return self._criteria(self._so_far, self.scores).tolist()

    @property
    def sequences(self) -> Tensor:
        """``(B, P + columns)``: prompts and tokens, ended rows padded."""
        rows = [
            row[:length] + [self._pad_id] * (self._num_columns - length)
            for row, length in zip(self._rows, map(self._length, range(len(self._rows))), strict=True)
        ]
        new = torch.tensor(rows, dtype=self._input_ids.dtype, device=self._input_ids.device)
        return torch.cat([self._input_ids, new.view(len(rows), self._num_columns)], dim=1)

    def _length(self, row: int) -> int:
        length = self._lengths[row]
        return self._num_columns if length is None else length

    @property
    def scores(self) -> tuple[Tensor, ...] | None:
        """The processed logits ``(B, V)`` of each column. In an ended row the padding has all the mass."""
        return None if self._scores is None else tuple(self._scores.columns)

    @property
    def logits(self) -> tuple[Tensor, ...] | None:
        """The raw logits, like `scores`."""
        return None if self._logits is None else tuple(self._logits.columns)


class _Columns:
    """Logits of rows that advance at their own pace, put into columns."""

    def __init__(self, num_rows: int):
        self._waiting: list[list[Tensor]] = [[] for _ in range(num_rows)]
        self.columns: list[Tensor] = []

    def take(self, logits: Tensor, tokens: list[list[int]]) -> None:
        """Take ``logits (B, N+1, V)``, of which each row uses as many as it emitted tokens."""
        for waiting, values, emitted in zip(self._waiting, logits, tokens, strict=True):
            waiting += values[: len(emitted)].clone().unbind()

    def add_column(self, padded: list[bool], pad_id: int) -> None:
        column = [None if pad else waiting.pop(0) for waiting, pad in zip(self._waiting, padded, strict=True)]
        like = next(values for values in column if values is not None)
        certain = torch.full_like(like, -torch.inf)
        certain[pad_id] = 0
        self.columns.append(torch.stack([certain if values is None else values for values in column]))
