"""The decoding loop: propose → forward → verify → compact → emit, for any target, drafter and rule of acceptance."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._validate import check_shape
from ..types import Verification
from .acceptance import Acceptance
from .budget import Budget
from .drafters.plain import root_alone
from .drafting import DraftContext, first_nodes
from .host import on_host, vector_of
from .protocols import Draft, Drafter, LayerPlan, Target, TargetOutput
from .randomness import uniforms_at
from .stats import DecodeStats, PhaseClock
from .walk import along_path, verify_processed


class Step(NamedTuple):
    """What one step gave. The first one comes from the prompts alone and has at most one token for each row.

    Attributes:
        tokens: for each row the ids it emitted, in order; none for a row that ended earlier.
        finished: for each row whether it has ended.
        failed: for each row whether it ended because its logits were NaN.
        draft: the tree that was judged.
        output: what the target said about it.
        verification: the decision. A row that ends may have emitted fewer tokens than were accepted.
        processed_logits: ``(B, N+1, V)``; token *j* was chosen from row *j*. None without logits processors.
    """

    tokens: list[list[int]]
    finished: list[bool]
    failed: list[bool]
    draft: Draft
    output: TargetOutput
    verification: Verification
    processed_logits: Tensor | None

    @property
    def raw_logits(self) -> Tensor:
        """``(B, N+1, V)``; what the target predicted where token *j* was chosen."""
        return along_path(self.output.logits, self.verification)


class ProcessLogits(Protocol):
    """Changes the logits before they are judged."""

    def __call__(self, logits: Tensor, nodes: Tensor, *, draft: Draft, emitted: Sequence[Sequence[int]]) -> Tensor:
        """Process the logits after one node of each row.

        Args:
            logits: ``(B, V)``, as the target gave them; not to be written to.
            nodes: ``(B,) int64`` node of each row; −1 where the result is not read.
            draft: the tree that the nodes belong to.
            emitted: the tokens of each row so far. The last of them is the root of the draft; right after the prompts
                there is none, and the root is the last prompt token. So a node's context is the prompt, ``emitted``,
                and the path below the root.

        Returns:
            ``(B, V)``.
        """
        ...


StopRule = Callable[[Step], Sequence[int | None]]


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
    budget: Budget | None = None,
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
        process_logits: changes the logits; is called for the nodes that decide, see `verify_processed`.
        stop: is given each step before it is emitted, and says for each row None (go on) or *n* (end it after the
            first *n* of its tokens in this step).
        stats: is filled in place.
        budget: limits the drafts, step by step, by the rows that go on and the longest of them; one that learns also by
            what was accepted (it belongs to one run at a time). What a row emits stays exact; in a sampled run its
            tokens then depend, through the sizes of its drafts, on the other rows, too.

    Yields:
        A `Step` for the prompts, then one for each decode step. Closing the iterator ends the run.

    Raises:
        ValueError: wrong shapes, ``max_new_tokens`` below 1, or a cache too small for the longest row, which needs
            ``prompt_len + max_new_tokens − 1 + drafter.max_nodes`` cache rows. Nothing has run by then.

    Example:
        >>> steps = decode(target, drafter, ids, lengths, acceptance=GreedyAcceptance(), max_new_tokens=32)
        >>> rows = [list(chain(*parts)) for parts in zip(*(step.tokens for step in steps))]
    """
    limits, lengths = _checked_limits(target, drafter, prompt_ids, prompt_len, max_new_tokens)
    rows = _Rows(limits, lengths, frozenset(eos_ids), DecodeStats() if stats is None else stats)
    clock = PhaseClock(rows.stats, prompt_ids.device)
    # Greedy decisions draw nothing: whatever stands in the place of the uniforms does not matter.
    unread = torch.full((len(limits), drafter.max_nodes), 0.5, device=prompt_ids.device)
    is_greedy = not isinstance(temperature, Tensor) and temperature == 0
    if not isinstance(temperature, Tensor):
        temperature = torch.full(prompt_len.shape, temperature, dtype=torch.float32, device=prompt_ids.device)
    if seeds is None:
        seeds = torch.zeros_like(prompt_len, dtype=torch.int64)
    for name, tensor in (("temperature", temperature), ("seeds", seeds)):
        check_shape("decode", name, tensor, prompt_len.shape)

    def judge(draft: Draft, output: TargetOutput, root_position: Tensor) -> Step:
        num_nodes = draft.ids.shape[1]
        uniforms = unread[:, :num_nodes] if is_greedy else uniforms_at(seeds, root_position, num_nodes)
        question = (draft, output.logits, temperature, uniforms)
        if process_logits is None:
            verification, processed = acceptance(*question), None
        else:
            process = partial(process_logits, draft=draft, emitted=rows.emitted)
            _, active = rows.flags(prompt_ids.device)
            verification, processed = verify_processed(acceptance, *question, process, active)
        decided = on_host(*verification)
        clock.lap("verify")
        rows.take(*decided)
        step = Step(rows.tokens, rows.finished, rows.failed, draft, output, verification, processed)
        if stop is not None:
            rows.cut(stop(step))
        rows.book(num_nodes)
        return step

    context = DraftContext(target, rows, temperature, seeds, is_greedy=is_greedy, process_logits=process_logits)
    context.budget = budget
    return _steps(context, drafter, prompt_ids, prompt_len, judge, rows, clock)


@torch.no_grad()
def _steps(
    context: DraftContext,
    drafter: Drafter,
    prompt_ids: Tensor,
    prompt_len: Tensor,
    judge: Callable[[Draft, TargetOutput, Tensor], Step],
    rows: "_Rows",
    clock: PhaseClock,
) -> Iterator[Step]:
    """Run the steps. ``judge`` applies the rules of the run, ``rows`` keeps its books."""
    clock.start()
    target = context.target
    if hasattr(drafter, "bind"):
        drafter.bind(context)
    budget: Any = context.budget
    if hasattr(budget, "begin"):
        budget.begin()
    last = prompt_len.to(torch.int64) - 1
    output = target.prefill(prompt_ids, prompt_len)
    drafter.begin(prompt_ids, prompt_len, output)
    clock.lap("prefill")
    try:
        yield judge(root_alone(prompt_ids.gather(1, last[:, None])), output, last)
        rows.leave_out(target)
        while not all(rows.finished):
            clock.lap("emit")
            context.limit_nodes(drafter.max_nodes)
            draft = drafter.propose(rows.pending(prompt_ids.device))
            if draft.ids.shape[1] > drafter.max_nodes:
                raise ValueError(
                    f"decode: the drafter's max_nodes is {drafter.max_nodes}, got {draft.ids.shape[1]} nodes"
                )
            draft = first_nodes(draft, context.max_nodes)
            clock.lap("propose")
            output = _forward(target, draft)
            clock.lap("forward")
            step = judge(draft, output, target.prefix_len)
            context.learn(rows.accepted.values())
            num_kept, (has_emitted, active) = rows.kept(step.verification), rows.flags(prompt_ids.device)
            clock.lap("emit")
            target.commit(step.verification.accepted, num_kept, has_emitted)
            drafter.observe(draft, output, step.verification, active)
            rows.leave_out(target)
            clock.lap("compact")
            yield step
    finally:
        clock.lap("emit")
        clock.settle()


def _forward(target: Any, draft: Draft) -> TargetOutput:
    """Run the nodes of a draft through the layers that it has not run."""
    if not draft.num_layers_run:
        return target.forward(draft.ids, draft.tree_mask, draft.depths)
    plan = LayerPlan(start=draft.num_layers_run)
    return target.run_layers(draft.ids, draft.tree_mask, draft.depths, plan, hidden=draft.hidden)


class _Rows:
    """What each row has emitted, and the rules that end it; all on the host.

    ``tokens``, ``finished``, ``failed`` and ``accepted`` are those of the present step, in lists of its own.
    """

    def __init__(self, limits: list[int], prompt_lengths: list[int], eos_ids: frozenset[int], stats: DecodeStats):
        self.limits, self.prompt_lengths, self.eos_ids, self.stats = limits, prompt_lengths, eos_ids, stats
        self.emitted: list[list[int]] = [[] for _ in limits]
        self.tokens: list[list[int]] = [[] for _ in limits]
        self.finished = [False] * len(limits)
        self.failed = [False] * len(limits)
        self.accepted: dict[int, list[int]] = {}
        self.num_running = len(limits)
        # What `flags` gave last, with the lists that it stands for.
        self._flags: tuple[list[list[bool]], Any] = [], None

    @property
    def longest(self) -> int:
        """Tokens of the longest row that goes on, prompt included."""
        rows = zip(self.prompt_lengths, self.emitted, self.finished, strict=True)
        return max((length + len(emitted) for length, emitted, finished in rows if not finished), default=0)

    def take(self, output_ids: list[list[int]], num_accepted: list[int], accepted: list[list[int]]) -> None:
        """Give each row what its limit and the EOS ids allow of a `Verification`."""
        running = [row for row, finished in enumerate(self.finished) if not finished]
        self.tokens = [[] for _ in self.limits]
        self.finished, self.failed = list(self.finished), list(self.failed)
        self.accepted = {}
        for row in running:
            count = num_accepted[row]
            ids = output_ids[row][: count + 1]
            self.accepted[row] = accepted[row][:count]
            self.failed[row] = ids[0] < 0
            self.tokens[row] = [] if self.failed[row] else self._allowed(row, ids)
            self.finished[row] |= self.failed[row]

    def _allowed(self, row: int, ids: list[int]) -> list[int]:
        """Cut the ids at the row's limit and behind its first EOS."""
        room = self.limits[row] - len(self.emitted[row])
        eos = next((i for i, token in enumerate(ids[:room]) if token in self.eos_ids), None)
        self.finished[row] = eos is not None or len(ids) >= room
        return ids[:room] if eos is None else ids[: eos + 1]

    def cut(self, cuts: Sequence[int | None]) -> None:
        """End rows as the stop rule says."""
        for row, cut in enumerate(cuts):
            if cut is not None:
                del self.tokens[row][cut:]
                self.finished[row] = True

    def book(self, num_nodes: int) -> None:
        """Append the step's tokens to what the rows emitted, and count them."""
        if any(self.emitted):
            self.stats.count_step([path[: len(self.tokens[row])] for row, path in self.accepted.items()], num_nodes)
        else:
            self.stats.num_rows += len(self.accepted)
        self.stats.num_tokens += sum(map(len, self.tokens))
        for emitted, tokens in zip(self.emitted, self.tokens, strict=True):
            emitted += tokens

    def leave_out(self, target: Any) -> None:
        """Tell a target that can leave rows out which rows go on, when some have just ended."""
        running = [row for row, finished in enumerate(self.finished) if not finished]
        if running and len(running) < self.num_running and hasattr(target, "run_only"):
            target.run_only(running)
        self.num_running = len(running)

    def pending(self, device: torch.device) -> Tensor:
        """Return the last token of each row, ``(B,) int64``; 0, a token that nobody reads, for a row without any."""
        return vector_of([emitted[-1] if emitted else 0 for emitted in self.emitted], "q", device)

    def kept(self, verification: Verification) -> Tensor:
        """Return how many drafts each row has just kept, ``(B,) int32``; of one without new tokens it means nothing."""
        num_accepted = verification.num_accepted
        if all(len(self.tokens[row]) == len(path) + 1 for row, path in self.accepted.items()):
            return num_accepted
        return vector_of([max(0, len(tokens) - 1) for tokens in self.tokens], "i", num_accepted.device)

    def flags(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return whether each row has just emitted anything, and whether it goes on, ``(B,) bool`` each."""
        flags = [[len(tokens) > 0 for tokens in self.tokens], [not finished for finished in self.finished]]
        if flags != self._flags[0]:  # most steps end no row
            self._flags = flags, tuple(vector_of(rows, "b", device).view(torch.bool) for rows in flags)
        return self._flags[1]


def _checked_limits(
    target: Target, drafter: Drafter, prompt_ids: Tensor, prompt_len: Tensor, max_new_tokens: int | Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return every row's limit and length after checking what `decode` promises to check."""
    check_shape("decode", "prompt_ids", prompt_ids, ("B", "L"))
    batch, width = prompt_ids.shape
    check_shape("decode", "prompt_len", prompt_len, (batch,))
    limits = [max_new_tokens] * batch if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != batch or any(limit < 1 for limit in limits):
        raise ValueError(f"decode: max_new_tokens must be >= 1 for each of {batch} rows, got {max_new_tokens}")
    lengths = prompt_len.tolist()
    for length, limit in zip(lengths, limits, strict=True):
        if not 1 <= length <= width:
            raise ValueError(f"decode: prompt_len must be in [1, {width}], got {length}")
        # A row that has ended holds all but its last token, and still takes part in the forwards of the others.
        needed = length + limit - 1 + drafter.max_nodes
        if needed > target.capacity:
            raise ValueError(
                f"decode: the target's capacity must be at least {needed} for a prompt of {length} tokens, "
                f"max_new_tokens {limit} and drafts of {drafter.max_nodes} nodes, got {target.capacity}"
            )
    return limits, lengths
