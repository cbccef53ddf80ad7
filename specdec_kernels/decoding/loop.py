"""The decoding loop: propose → forward → verify → compact → emit, for any target, drafter and rule of acceptance."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._validate import check_shape
from ..types import Verification
from .acceptance import Acceptance
from .protocols import Draft, Drafter, Target, TargetOutput
from .randomness import uniforms_at
from .stats import DecodeStats, PhaseClock

ProcessLogits = Callable[[Tensor, Draft, Sequence[Sequence[int]]], Tensor]
StopRule = Callable[[Sequence[Sequence[int]]], Sequence[int | None]]


class Step(NamedTuple):
    """What one step gave. The first one comes from the prompts alone and has one token for each row.

    Attributes:
        tokens: for each row the ids it emitted, in order; none for a row that ended earlier.
        finished: for each row whether it has ended.
        failed: for each row whether it ended because its logits were NaN.
        draft: the tree that was judged.
        output: what the target said about it.
        logits: ``(B, T, V)``; ``output.logits`` after the logits processors, as they were judged.
        verification: the decision. Emitted token *j* was chosen from the logits of the root (*j* = 0) or of node
            ``accepted[:, j - 1]``. A row that ends may have emitted fewer tokens than were accepted.
    """

    tokens: list[list[int]]
    finished: list[bool]
    failed: list[bool]
    draft: Draft
    output: TargetOutput
    logits: Tensor
    verification: Verification


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: Tensor,
    prompt_len: Tensor,
    *,
    acceptance: Acceptance,
    max_new_tokens: int | Sequence[int],
    eos_ids: Collection[int] = (),
    temperature: float | Tensor = 0.0,
    seeds: Tensor | None = None,
    process_logits: ProcessLogits | None = None,
    stop: StopRule | None = None,
    stats: DecodeStats | None = None,
) -> Iterator[Step]:
    """Decode a batch of prompts speculatively, a `Step` at a time.

    Each row has its own length and accepts its own number of drafts. A row ends with the first of: its number of
    tokens, an id of ``eos_ids`` (which it emits), the ``stop`` rule, NaN logits. An ended row emits nothing more and
    its cache stays as it is; the iteration ends with the last row. After each step the cache of a row holds the prompt
    and what the row emitted but the last token: ``prefix_len == prompt_len + emitted − 1``.

    Random numbers depend only on a row's seed and on the absolute position, so a row's tokens do not depend on its
    place in the batch or on the other rows. There is one wait for the device in a step: reading the verification.

    Args:
        target: a fresh one, without committed rows (not checked).
        drafter: proposes the trees.
        prompt_ids: ``(B, L) int64``, right-padded.
        prompt_len: ``(B,) int32``, 1…L.
        acceptance: the rule that judges drafts.
        max_new_tokens: at least 1, for all rows or one number for each.
        eos_ids: ids that end a row.
        temperature: of all rows or ``(B,)``; 0 decodes greedily. It divides the processed logits.
        seeds: ``(B,) int64``; zeros when None.
        process_logits: ``(logits (B, T, V), draft, emitted) → logits (B, T, V)``; ``emitted`` lists the tokens of each
            row so far, the last of which is the root of the draft (right after the prompts there is none, and the root
            is the last prompt token). Node *i*'s context is the prompt, ``emitted`` and the path from the root to *i*.
        stop: ``tokens → cuts``; is given what each row is about to emit, once in a step, and says for each row None
            (go on) or *n* (end it after the first *n* of these tokens).
        stats: is filled in place.

    Yields:
        A `Step` for the prompts, then one for each decode step. Closing the iterator ends the run.

    Raises:
        ValueError: wrong shapes, ``max_new_tokens`` below 1, or a cache too small for the longest row, which needs
            ``prompt_len + max_new_tokens − 1 + drafter.max_nodes`` cache rows. Nothing has run by then.

    Example:
        >>> steps = decode(target, drafter, ids, lengths, acceptance=GreedyAcceptance(), max_new_tokens=32)
        >>> rows = [list(chain(*parts)) for parts in zip(*(step.tokens for step in steps))]
    """
    limits = _checked_limits(target, drafter, prompt_ids, prompt_len, max_new_tokens)
    rows = _Rows(limits, frozenset(eos_ids), stop, DecodeStats() if stats is None else stats)
    clock = PhaseClock(rows.stats, prompt_ids.device)
    if not isinstance(temperature, Tensor):
        temperature = torch.full(prompt_len.shape, temperature, dtype=torch.float32, device=prompt_ids.device)
    if seeds is None:
        seeds = torch.zeros_like(prompt_len, dtype=torch.int64)
    for name, tensor in (("temperature", temperature), ("seeds", seeds)):
        check_shape("decode", name, tensor, prompt_len.shape)

    def judge(draft: Draft, output: TargetOutput, root_position: Tensor) -> Step:
        logits = output.logits if process_logits is None else process_logits(output.logits, draft, rows.emitted)
        uniforms = uniforms_at(seeds, root_position, draft.ids.shape[1])
        verification = acceptance(draft, logits, temperature, uniforms)
        decided = torch.cat([verification.num_accepted[:, None], verification.output_ids], dim=1).tolist()
        clock.lap("verify")
        tokens = rows.take(decided)
        return Step(tokens, list(rows.finished), list(rows.failed), draft, output, logits, verification)

    return _steps(target, drafter, prompt_ids, prompt_len, judge, rows, clock)


@torch.no_grad()
def _steps(
    target: Target,
    drafter: Drafter,
    prompt_ids: Tensor,
    prompt_len: Tensor,
    judge: Callable[[Draft, TargetOutput, Tensor], Step],
    rows: "_Rows",
    clock: PhaseClock,
) -> Iterator[Step]:
    """Run the steps. ``judge`` applies the rules of the run, ``rows`` keeps its books."""
    clock.start()
    last = prompt_len.to(torch.int64) - 1
    output = target.prefill(prompt_ids, prompt_len)
    drafter.begin(prompt_ids, prompt_len, output)
    clock.lap("prefill")
    try:
        yield judge(_root_alone(prompt_ids.gather(1, last[:, None])), output, last)
        while not all(rows.finished):
            clock.lap("emit")
            draft = drafter.propose(rows.pending(prompt_ids.device))
            if draft.ids.shape[1] > drafter.max_nodes:
                raise ValueError(
                    f"decode: the drafter's max_nodes is {drafter.max_nodes}, got {draft.ids.shape[1]} nodes"
                )
            clock.lap("propose")
            output = target.forward(draft.ids, draft.tree_mask, draft.depths)
            clock.lap("forward")
            step = judge(draft, output, target.prefix_len)
            count, active = rows.taken(prompt_ids.device)
            clock.lap("emit")
            target.commit(step.verification.accepted, (count - 1).clamp_min(0), count > 0)
            drafter.observe(draft, output, step.verification, active)
            clock.lap("compact")
            yield step
    finally:
        clock.lap("emit")
        clock.settle()


class _Rows:
    """What each row has emitted, and the rules that end it; all on the host."""

    def __init__(self, limits: list[int], eos_ids: frozenset[int], stop: StopRule | None, stats: DecodeStats):
        self.limits, self.eos_ids, self.stop, self.stats = limits, eos_ids, stop, stats
        self.emitted: list[list[int]] = [[] for _ in limits]
        self.tokens: list[list[int]] = [[] for _ in limits]
        self.finished = [False] * len(limits)
        self.failed = [False] * len(limits)

    def take(self, decided: list[list[int]]) -> list[list[int]]:
        """Let each row emit what its rules allow of ``[num_accepted, *output_ids]``, and end it where they say."""
        running = [row for row, finished in enumerate(self.finished) if not finished]
        self.tokens = [[] for _ in self.limits]
        for row in running:
            count, *ids = decided[row]
            self.failed[row] = ids[0] < 0
            self.tokens[row] = [] if self.failed[row] else self._allowed(row, ids[: count + 1])
        self._apply_stop_rule(running)
        self._count(running, decided)
        for row in running:
            self.emitted[row] += self.tokens[row]
        return self.tokens

    def _allowed(self, row: int, ids: list[int]) -> list[int]:
        """Cut the ids at the row's limit and behind its first EOS."""
        room = self.limits[row] - len(self.emitted[row])
        eos = next((i for i, token in enumerate(ids[:room]) if token in self.eos_ids), None)
        self.finished[row] = eos is not None or len(ids) >= room
        return ids[:room] if eos is None else ids[: eos + 1]

    def _apply_stop_rule(self, running: list[int]) -> None:
        cuts = self.stop(self.tokens) if self.stop else [None] * len(self.tokens)
        for row in running:
            if cuts[row] is not None:
                self.tokens[row] = self.tokens[row][: cuts[row]]
            self.finished[row] = self.finished[row] or self.failed[row] or cuts[row] is not None

    def _count(self, running: list[int], decided: list[list[int]]) -> None:
        self.stats.num_tokens += sum(map(len, self.tokens))
        if any(self.emitted):
            self.stats.count_step([min(decided[row][0], len(self.tokens[row])) for row in running])
        else:
            self.stats.num_rows += len(running)

    def pending(self, device: torch.device) -> Tensor:
        """Return the last token of each row, ``(B,) int64``; 0, a token that nobody reads, for a row without any."""
        return torch.tensor([emitted[-1] if emitted else 0 for emitted in self.emitted], device=device)

    def taken(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return how many tokens each row has just emitted, ``(B,) int32``, and which rows go on, ``(B,) bool``."""
        counts = torch.tensor(
            [[len(tokens) for tokens in self.tokens], self.finished], dtype=torch.int32, device=device
        )
        return counts[0], counts[1] == 0


def _root_alone(ids: Tensor) -> Draft:
    """Return the draft that drafts nothing: ``ids (B, 1)`` are the roots."""
    zero = torch.zeros(1, 1, dtype=torch.int32, device=ids.device)
    return Draft(ids, zero - 1, torch.ones(1, 1, 1, dtype=torch.int64, device=ids.device), zero, max_depth=0)


def _checked_limits(
    target: Target, drafter: Drafter, prompt_ids: Tensor, prompt_len: Tensor, max_new_tokens: int | Sequence[int]
) -> list[int]:
    """Return every row's limit after checking what `decode` promises to check."""
    check_shape("decode", "prompt_ids", prompt_ids, ("B", "L"))
    batch, width = prompt_ids.shape
    check_shape("decode", "prompt_len", prompt_len, (batch,))
    limits = [max_new_tokens] * batch if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != batch or any(limit < 1 for limit in limits):
        raise ValueError(f"decode: max_new_tokens must be >= 1 for each of {batch} rows, got {max_new_tokens}")
    for length, limit in zip(prompt_len.tolist(), limits, strict=True):
        if not 1 <= length <= width:
            raise ValueError(f"decode: prompt_len must be in [1, {width}], got {length}")
        # A row that has ended holds all but its last token, and still takes part in the forwards of the others.
        needed = length + limit - 1 + drafter.max_nodes
        if needed > target.capacity:
            raise ValueError(
                f"decode: the target's capacity must be at least {needed} for a prompt of {length} tokens, "
                f"max_new_tokens {limit} and drafts of {drafter.max_nodes} nodes, got {target.capacity}"
            )
    return limits
