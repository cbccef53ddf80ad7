"""Draft with a smaller model of the same vocabulary: classic speculative decoding."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._validate import check_range
from ...types import Verification
from ..drafting import ChainLayout, DraftContext, DrawnChain
from ..exits import ExitRule
from ..protocols import Draft, RewindableTarget, TargetOutput
from .plain import root_alone

# Emitted tokens of a row that are fed at once, when the model has not been asked for a while.
FED_AT_ONCE = 64


class DraftModelDrafter:
    """Draft a chain with a model of its own (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, 2302.01318).

    With sampling, tokens are drawn from the draft model's distribution, processed as the target's (temperature, top-p,
    …), and `Draft.logits` reports it, so verification is exact and accepts as much as the two distributions overlap.

    The draft model has a cache of its own. After a step it forgets the drafts that were not emitted and keeps the
    others; what was emitted without having been fed (the recovered or bonus token, the last draft when all were
    accepted, tokens that another drafter contributed) is fed together with the next pending token:

        text        p p p p a b c|d|      d: pending
        draft KV    p p p p a                b, c, d are fed in one forward, then drafts follow one at a time

    A row stops drafting early by the ``exit_rule``, whose threshold follows how much is accepted: long drafts where the
    models agree, short ones where they do not.

    Args:
        make_draft: ``(batch_size, capacity) → target`` makes the draft model with an empty cache, for example
            ``functools.partial(HFTarget, small_model)``. Its ids must mean what the target's do, which is not checked;
            its logits may be wider or narrower than the target's (padded vocabularies): ids that the target does not
            have are never drafted.
        max_drafts: the longest chain, at least 1.
        exit_rule: when a row stops earlier.

    Raises:
        ValueError: ``max_drafts`` out of range, or at the first run: the draft model is on another device.

    Example:
        >>> make_draft = lambda batch_size, capacity: ...  # functools.partial(HFTarget, small_model)
        >>> DraftModelDrafter(make_draft, max_drafts=6).max_nodes
        7
    """

    def __init__(
        self,
        make_draft: Callable[[int, int], RewindableTarget],
        *,
        max_drafts: int = 8,
        exit_rule: ExitRule | None = None,
    ):
        check_range("DraftModelDrafter", "max_drafts", max_drafts, 1, 1023)
        self._make_draft = make_draft
        self.max_drafts = max_drafts
        self.exit_rule = ExitRule() if exit_rule is None else exit_rule
        self._context: DraftContext | None = None

    @property
    def max_nodes(self) -> int:
        """The longest chain and its root."""
        return self.max_drafts + 1

    def bind(self, context: DraftContext) -> None:
        """Take the run: what its rows emitted, and how its tokens are drawn."""
        self._context = context

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Start a batch: make the draft model's cache and feed it the prompts."""
        if self._context is None:
            raise RuntimeError("DraftModelDrafter: it works only inside decode, which calls bind and begin")
        batch, device = len(prompt_ids), prompt_ids.device
        # No row of the target gets longer than its capacity; any row may be behind it while another one is fed.
        capacity = self._context.target.capacity + max(self.max_drafts, FED_AT_ONCE)
        # The last run's ends first: a prepared model lends its recordings to one target at a time.
        vars(self).pop("model", None)
        self.model = self._make_draft(batch, capacity)
        if self.model.prefix_len.device != device:
            raise ValueError(
                f"DraftModelDrafter: the draft model must be on {device}, got {self.model.prefix_len.device}"
            )
        self.model.prefill(prompt_ids, prompt_len)
        self.exits = self.exit_rule.begin(batch, device)
        self._layout = ChainLayout(max(self.max_nodes, FED_AT_ONCE), device)
        self._vocab_size = output.logits.shape[-1]
        self._prompt_len = prompt_len.tolist()
        # Of each row: committed cache rows, emitted tokens among them, and the drafts that follow those.
        self._lengths: list[int] = list(self._prompt_len)
        self._num_known = [0] * batch
        self._fed: list[list[int]] = [[] for _ in range(batch)]
        self._num_running = batch

    @torch.no_grad()
    def propose(self, pending: Tensor) -> Draft:
        """Return the chains below the pending tokens ``(B,) int64``, as long as the longest row's.

        Waits for the device once for each token: whether to go on is the rows' decision.
        """
        assert self._context is not None
        if self._context.max_nodes == 1:
            # What is emitted meanwhile is fed when drafts are wanted again.
            return root_alone(pending[:, None])
        logits = self._catch_up(self._context, pending.device)
        chain = DrawnChain(self._context, self._layout, pending, self.max_nodes)
        chain.extend(logits, self.exits.threshold)
        num_fed = torch.zeros_like(chain.num_nodes)
        no_drafts = chain.last.new_empty(len(pending), 0, dtype=torch.int32)
        while chain.wants_more():
            drafting = chain.drafting
            output = self.model.forward(chain.last[:, None], self._layout.mask(1), self._layout.depths(1))
            self.model.commit(no_drafts, torch.zeros_like(num_fed), drafting)
            num_fed = num_fed + drafting
            chain.extend(self._fitted(output.logits[:, 0]), self.exits.threshold)
        draft = self.exits.watch(chain.draft())
        drafts = draft.ids[:, 1:].tolist()
        self._fed = [row[:count] for row, count in zip(drafts, num_fed.tolist(), strict=True)]
        self._lengths = [length + len(row) for length, row in zip(self._lengths, self._fed, strict=True)]
        return draft

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Move the thresholds. What was emitted is read from the run when the next drafts are asked for."""
        self.exits.settle(verification, active)

    def _catch_up(self, context: DraftContext, device: torch.device) -> Tensor:
        """Forget drafts that were not emitted, feed what was; return the logits ``(B, V)`` after the pending tokens."""
        emitted, finished = context.emitted, context.finished
        running = [row for row, ended in enumerate(finished) if not ended]
        if len(running) < self._num_running and hasattr(self.model, "run_only"):
            self.model.run_only(running)
        self._num_running = len(running)
        missing = [[0] if finished[row] else self._rewind(row, tokens) for row, tokens in enumerate(emitted)]
        self.model.truncate(torch.tensor(self._lengths, dtype=torch.int32, device=device))
        for row, tokens in enumerate(missing):
            if not finished[row]:
                self._lengths[row] += len(tokens)
                self._num_known[row] = len(emitted[row])
        while max(map(len, missing)) > FED_AT_ONCE:
            # The last tokens of all rows are fed together, so that their logits come from one forward.
            is_long = [len(tokens) > FED_AT_ONCE for tokens in missing]
            self._feed([tokens[: FED_AT_ONCE * long] for tokens, long in zip(missing, is_long, strict=True)], device)
            missing = [tokens[FED_AT_ONCE * long :] for tokens, long in zip(missing, is_long, strict=True)]
        return self._feed(missing, device)

    def _feed(self, tokens: Sequence[list[int]], device: torch.device) -> Tensor:
        """Run and commit tokens of each row, of some rows none; return the logits ``(B, V)`` after the last ones."""
        assert self._context is not None
        width = max(map(len, tokens))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=device)
        last = torch.tensor([max(0, len(row) - 1) for row in tokens], device=device)
        is_fed = torch.tensor([len(row) > 0 for row in tokens], device=device) & self._context.active
        output = self.model.forward(ids, self._layout.mask(width), self._layout.depths(width))
        path = self._layout.depths(width)[:, 1:].expand(len(ids), -1).contiguous()
        self.model.commit(path, last.to(torch.int32), is_fed)
        return self._fitted(output.logits[torch.arange(len(ids), device=device), last])

    def _rewind(self, row: int, emitted: Sequence[int]) -> list[int]:
        """Shorten the row to what was emitted, and return the emitted tokens that are not in its cache yet."""
        new = list(emitted[self._num_known[row] :])
        kept = 0
        for fed, token in zip(self._fed[row], new[:-1], strict=False):
            if fed != token:
                break
            kept += 1
        self._lengths[row] = self._prompt_len[row] + self._num_known[row] + kept
        return new[kept:]

    def _fitted(self, logits: Tensor) -> Tensor:
        """Cut or pad ``(B, V')`` to the target's vocabulary."""
        missing = self._vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._vocab_size]
