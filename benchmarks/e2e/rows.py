"""What a run of `benchmarks.e2e.compare` writes: a head, then a line for each prompt and provider."""

import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import write_records


@dataclass
class Row:
    """One prompt under one provider; what is of its batch: ``batch_tokens``, ``seconds``,
    ``passes``.

    ``first_token_s`` is the time until the batch's first tokens were there, the prompts' pass; None when not known.
    ``differs_from`` holds, for each standard in the run, where the text first differs, None when it is equal.
    ``peak_bytes`` is what the call had resident beyond the interpreter and the libraries. ``gap_ulp`` is how far the
    two candidates' logits lie apart in ``generate`` where its text is left, in bf16 units in the last place.
    """

    question_id: int
    task: str
    provider: str
    new_tokens: int
    batch_tokens: int
    seconds: float | None = None
    first_token_s: float | None = None
    passes: int | None = None
    tokens_per_step: float | None = None
    peak_bytes: int | None = None
    differs_from: dict[str, int | None] = field(default_factory=dict)
    gap_ulp: float | None = None
    batch_rows: int = 1
    prompt_tokens: int | None = None

    @property
    def tokens_per_s(self) -> float:
        """New tokens of the batch over its time; NaN for a run that was not timed."""
        return self.batch_tokens / self.seconds if self.seconds else math.nan

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens after the first of a text over the time after it; NaN when it is not known or there are none."""
        later = self.batch_tokens - self.batch_rows
        if self.seconds is None or self.first_token_s is None or later <= 0:
            return math.nan
        return later / (self.seconds - self.first_token_s)

    @property
    def step_ms(self) -> float:
        """The whole call over the target's passes, that of the prompt among them; NaN when they are not known."""
        return math.nan if self.seconds is None or self.passes is None else self.seconds * 1e3 / (self.passes + 1)


@dataclass
class Run:
    """A result file: the machine, the command, and what else was told; the rows."""

    head: dict[str, Any]
    rows: list[Row]

    def providers(self) -> list[str]:
        """Return the providers in the order of the run."""
        return list(dict.fromkeys(row.provider for row in self.rows))

    def of(self, provider: str, task: str | None = None) -> list[Row]:
        """Return the rows of a provider, of one kind of task or of all."""
        return [row for row in self.rows if row.provider == provider and task in (None, row.task)]

    def speed_up(self, provider: str, over: str, task: str | None = None) -> float:
        """Return the geometric mean over prompts of the ratio of tokens/s; NaN when one of them is not there."""
        speeds = {row.question_id: row.tokens_per_s for row in self.of(over, task)}
        ratios = [row.tokens_per_s / speeds.get(row.question_id, math.nan) for row in self.of(provider, task)]
        return geometric(ratios)


def geometric(values: Iterable[float]) -> float:
    """Return the geometric mean, NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.mean(logs)) if logs else math.nan


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of the others lie, between the two nearest."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def without_folders(text: str) -> str:
    """Return a text with only the last part of each path in it: the others are this machine's own."""
    return re.sub(r"(?<![\w.])(?:~|\.{1,2})?/(?:[^\s/;,:]+/)*", "", text)


def read_run(path: Path) -> Run:
    """Read a result file."""
    head, *records = map(json.loads, path.read_text().splitlines())
    return Run(head, [Row(**record) for record in records])


def write_run(path: Path, run: Run) -> None:
    """Write a result file."""
    write_records(path, [run.head, *map(asdict, run.rows)])
