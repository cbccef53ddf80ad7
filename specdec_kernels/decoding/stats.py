"""What a decoding run did: how many drafts were accepted, and where the time went."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

PHASES = ("prefill", "propose", "forward", "verify", "compact", "emit")


@dataclass
class DecodeStats:
    """Counts and times of one or more runs; a run adds to what is there.

    Attributes:
        accepted_histogram: ``accepted_histogram[n]`` row-steps accepted ``n`` drafts. A *row-step* is one unfinished
            row of the batch in one step. Drafts behind an EOS, or behind a length limit, do not count.
        node_histogram: ``node_histogram[i]`` row-steps accepted node *i* of their draft, counted in the same way; node
            0, the root, is never counted.
        width_histogram: ``width_histogram[t]`` steps had drafts of *t* nodes.
        num_tokens: emitted tokens, the first one (from the prefill) included.
        num_steps: decode steps, that is forward passes after the prefill.
        num_rows: sequences decoded.
        phase_time_us: microseconds in each of `PHASES`. ``verify`` holds the logits processors and the wait for the
            device; ``emit`` holds the stop rules and whatever the caller does with the tokens (its streamer).
            On CUDA the times come from events and are there when the run has ended.

    Example:
        >>> stats = DecodeStats(accepted_histogram=[1, 1, 2], num_tokens=10, num_steps=4, num_rows=1)
        >>> stats.mean_accepted, stats.tokens_per_step
        (1.25, 2.25)
    """

    accepted_histogram: list[int] = field(default_factory=list)
    node_histogram: list[int] = field(default_factory=list)
    width_histogram: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0
    num_rows: int = 0
    phase_time_us: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def num_row_steps(self) -> int:
        """Row-steps: how often a row took part in a step."""
        return sum(self.accepted_histogram)

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted in a row-step, on average; NaN before the first step."""
        total = sum(n * count for n, count in enumerate(self.accepted_histogram))
        return total / self.num_row_steps if self.num_row_steps else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """Tokens a row emitted in a step, on average: plain decoding has 1. NaN before the first step."""
        return (self.num_tokens - self.num_rows) / self.num_row_steps if self.num_row_steps else float("nan")

    @property
    def total_time_us(self) -> float:
        """The sum over the phases, prefill included."""
        return sum(self.phase_time_us.values())

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of the whole run, all rows together; NaN when nothing was timed."""
        return self.num_tokens / self.total_time_us * 1e6 if self.total_time_us else float("nan")

    @property
    def node_gains(self) -> list[float]:
        """How often each node of the draft was accepted, the root's share 1; all nodes of the widest draft."""
        count = max(len(self.node_histogram), len(self.width_histogram) - 1, 1)
        nodes = self.node_histogram + [0] * (count - len(self.node_histogram))
        return [1.0, *(times / max(1, self.num_row_steps) for times in nodes[1:])]

    def count_step(self, accepted: Sequence[Sequence[int]], width: int) -> None:
        """Add a step: the nodes that each unfinished row accepted, of drafts with ``width`` nodes."""
        for path in accepted:
            _count(self.accepted_histogram, len(path))
            for node in path:
                _count(self.node_histogram, node)
        _count(self.width_histogram, width)
        self.num_steps += 1

    def __str__(self) -> str:
        """Return the figures as a table for people."""
        lines = [
            f"tokens            {self.num_tokens} in {self.num_steps} steps, {self.num_rows} sequences",
            f"tokens per step   {self.tokens_per_step:.2f}",
            f"accepted drafts   {self.mean_accepted:.2f} on average",
            f"tokens/s          {self.tokens_per_s:.1f}",
        ]
        lines += [_bar(f"  accepted {n}", count, self.num_row_steps) for n, count in enumerate(self.accepted_histogram)]
        lines.append("time")
        lines += [
            _bar(f"  {phase}", time_us, self.total_time_us, f"{time_us / 1e3:10.1f} ms")
            for phase, time_us in self.phase_time_us.items()
        ]
        return "\n".join(lines)


def _count(histogram: list[int], value: int) -> None:
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += 1


def _bar(label: str, value: float, total: float, shown: str | None = None) -> str:
    share = value / total if total else 0.0
    return f"{label:<14}{shown or f'{value:>10}'} {share:>6.1%} {'█' * round(share * 30)}".rstrip()


class PhaseClock:
    """Attribute the time since the last lap to a phase, without ever waiting for the device.

    On CUDA the boundaries are events, so a phase has the device time it took, not the time to launch it.
    """

    def __init__(self, stats: DecodeStats, device: torch.device):
        self._stats, self._device = stats, device
        self._on_cuda = device.type == "cuda"
        self.start()

    def start(self) -> None:
        """Begin the first phase here, not at construction."""
        self._marks = [("", self._now())]

    def _now(self):
        if not self._on_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self, phase: str) -> None:
        """End a phase here."""
        self._marks.append((phase, self._now()))
        if not self._on_cuda:
            self.settle()

    def settle(self) -> None:
        """Add the laps to the stats; on CUDA this waits for the last one."""
        if self._on_cuda:
            self._marks[-1][1].synchronize()
        for (_, start), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            time_us = start.elapsed_time(end) * 1e3 if self._on_cuda else (end - start) / 1e3
            self._stats.phase_time_us[phase] += time_us
        self._marks = self._marks[-1:]
