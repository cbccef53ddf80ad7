"""What a drafter that draws its tokens, or runs the target itself, gets from the loop; and chains drawn with it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..reference._verify_probs import draw, greedy_rows
from ..tree.mask import num_words, pack_mask
from .budget import Budget
from .protocols import Draft, Target
from .randomness import draft_uniforms_at

if TYPE_CHECKING:
    from .loop import ProcessLogits

# The most that the ops take.
MAX_NODES = 1024


class RowStates(Protocol):
    """What the loop knows of the rows; read at each step, never written to."""

    emitted: list[list[int]]
    finished: list[bool]

    @property
    def longest(self) -> int:
        """Tokens of the longest row that goes on."""
        ...


class DraftContext:
    """The run that a drafter drafts for: its target, and the way its tokens are drawn.

    A drafter that needs it has a method ``bind(context)``, which `decode` calls once, before the prefill.

    Attributes:
        target: the target of the run.
        temperature: ``(B,) fp32``, of the drafts as of the target.
        is_greedy: no row samples; known on the host.
        budget: limits the drafts; None for no limit.
        max_nodes: the most nodes that the present draft may have, root included. A draft with more is cut, so heeding
            it only saves work.
    """

    def __init__(
        self,
        target: Target,
        rows: RowStates,
        temperature: Tensor,
        seeds: Tensor,
        *,
        is_greedy: bool,
        process_logits: "ProcessLogits | None" = None,
    ):
        self.target, self.temperature, self.is_greedy = target, temperature, is_greedy
        self._rows, self._seeds, self._process_logits = rows, seeds, process_logits
        self.budget: Budget | None = None
        self.max_nodes = MAX_NODES

    def limit_nodes(self, max_nodes: int) -> None:
        """Ask the budget, if there is one, for this step's ``max_nodes``, at most those given."""
        self.max_nodes = max_nodes
        if self.budget is not None:
            num_rows = self._rows.finished.count(False)
            self.max_nodes = max(1, min(max_nodes, self.budget.choose(num_rows, self._rows.longest)))

    def learn(self, accepted: Iterable[Collection[int]]) -> None:
        """Tell a budget that learns which nodes each row accepted of the last draft."""
        budget: Any = self.budget
        if hasattr(budget, "observe"):
            budget.observe(self.max_nodes, accepted)

    @property
    def active(self) -> Tensor:
        """``(B,) bool``: the rows that go on."""
        return ~torch.tensor(self._rows.finished, dtype=torch.bool, device=self.temperature.device)

    @property
    def finished(self) -> Sequence[bool]:
        """Whether each row has ended, on the host."""
        return self._rows.finished

    @property
    def emitted(self) -> Sequence[Sequence[int]]:
        """The tokens of each row so far; the last one is the pending token."""
        return self._rows.emitted

    @property
    def processes(self) -> bool:
        """Whether logits are processed at all."""
        return self._process_logits is not None

    def uniforms(self, count: int) -> Tensor:
        """Return this step's numbers for the drafter, ``(B, count)`` in (0, 1), see `draft_uniforms_at`."""
        return draft_uniforms_at(self._seeds, self.target.prefix_len, count)

    def process(self, logits: Tensor, nodes: Tensor, draft: Callable[[], Draft]) -> Tensor:
        """Process draft logits ``(B, V)`` as the target's after the same nodes ``(B,)`` will be.

        Without it a draft would often be a token that the target's filters exclude. ``draft`` makes the draft so far;
        it is called only when there is something to process.
        """
        if self._process_logits is None:
            return logits
        return self._process_logits(logits, nodes, draft=draft(), emitted=self._rows.emitted)

    def draw(self, logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw a token of each row.

        Args:
            logits: ``(B, V)``, processed.
            uniforms: ``(B,)``; None in greedy runs.

        Returns:
            Ids ``(B,) int64`` and the probability that each had, ``(B,)``; greedy rows take the argmax, the
            probability is that at temperature 1. NaN for rows whose logits cannot be judged.
        """
        best, ids = logits.max(dim=-1)
        probs = (best.float() - logits.float().logsumexp(-1)).exp()
        if self.is_greedy or uniforms is None:
            return ids, probs
        is_greedy = greedy_rows(self.temperature)
        divisor = torch.where(is_greedy, 1.0, self.temperature.double())
        law = torch.softmax(logits.double() / divisor[:, None], dim=-1)
        drawn = draw(law, uniforms.double())
        drawn_probs = law.gather(1, drawn[:, None])[:, 0].to(probs.dtype)
        return torch.where(is_greedy, ids, drawn), torch.where(is_greedy, probs, drawn_probs)


def first_nodes(draft: Draft, num_nodes: int) -> Draft:
    """Cut a draft to its first nodes. What is left is exact: which nodes there are must not depend on their tokens."""
    if draft.ids.shape[1] <= num_nodes:
        return draft
    return draft._replace(
        ids=draft.ids[:, :num_nodes],
        parents=draft.parents[:, :num_nodes],
        tree_mask=draft.tree_mask[:, :num_nodes, : num_words(num_nodes)].contiguous(),
        depths=draft.depths[:, :num_nodes],
        max_depth=min(draft.max_depth, num_nodes - 1),
        logits=None if draft.logits is None else draft.logits[:, :num_nodes],
        num_nodes=None if draft.num_nodes is None else draft.num_nodes.clamp_max(num_nodes),
        hidden=None if draft.hidden is None else draft.hidden[:, :num_nodes],
    )


class ChainLayout:
    """The tensors that describe a chain of any length up to ``max_nodes``: views of the longest one's."""

    def __init__(self, max_nodes: int, device: torch.device | str | None = None):
        self.max_nodes = max_nodes
        causal = torch.ones(1, max_nodes, max_nodes, dtype=torch.bool, device=device).tril()
        self._mask = pack_mask(causal)
        self._depths = torch.arange(max_nodes, dtype=torch.int32, device=device)[None]

    def mask(self, num_nodes: int) -> Tensor:
        """``(1, T, W) int64``."""
        return self._mask[:, :num_nodes, : num_words(num_nodes)].contiguous()

    def depths(self, num_nodes: int) -> Tensor:
        """``(1, T) int32``."""
        return self._depths[:, :num_nodes]

    def parents(self, num_nodes: int) -> Tensor:
        """``(1, T) int32``."""
        return self._depths[:, :num_nodes] - 1


class DrawnChain:
    """Grow a chain below the pending tokens, a drawn token at a time; each row stops when it likes.

    The decision to go on is made from what was drawn before, never from a token that is then left out: so the chain
    stays a sample of the distributions it reports, and verification exact.

    Args:
        context: of the run.
        layout: of chains at least as long as this one gets.
        pending: ``(B,) int64``.
        max_nodes: the longest chain, root included; the context may allow less.
    """

    def __init__(self, context: DraftContext, layout: ChainLayout, pending: Tensor, max_nodes: int):
        self._context, self._layout, self.max_nodes = context, layout, min(max_nodes, context.max_nodes)
        self._ids, self._logits = [pending], list[Tensor]()
        self._uniforms = None if context.is_greedy else context.uniforms(self.max_nodes)
        self.drafting = context.active
        self.num_nodes = torch.ones_like(pending, dtype=torch.int32)

    @property
    def length(self) -> int:
        """Nodes so far, root included."""
        return len(self._ids)

    @property
    def last(self) -> Tensor:
        """``(B,) int64``: the newest node of each row."""
        return self._ids[-1]

    def wants_more(self) -> bool:
        """Say whether any row still drafts and there is room. On a GPU this waits for the device."""
        return self.length < self.max_nodes and bool(self.drafting.any())

    def extend(
        self, logits: Tensor, threshold: Tensor | float | None = None, *, token_map: Tensor | None = None
    ) -> None:
        """Draw the next node of each row that still drafts.

        Args:
            logits: ``(B, V)``, the draft distribution after the last node, not processed. A row with NaN stops.
            threshold: ``(B,)`` or a number; a row whose token was less probable than that stops *behind* it.
            token_map: ``(V',) int64``, the ids of logits ``(B, V')`` that leave the others out; in greedy runs whose
                logits are not processed.
        """
        node = self.length - 1
        nodes = torch.where(self.drafting, node, -1)
        logits = self._context.process(logits, nodes, self._unfinished)
        ids, probs = self._context.draw(logits, None if self._uniforms is None else self._uniforms[:, node + 1])
        self.drafting = self.drafting & ~probs.isnan()
        self.num_nodes = self.num_nodes + self.drafting
        self._ids.append(ids if token_map is None else token_map[ids])
        if self._uniforms is not None:
            # Of a recorded step they are written anew by the next one.
            self._logits.append(logits.clone())
        if threshold is not None:
            self.drafting = self.drafting & (probs >= threshold)

    def draft(self) -> Draft:
        """Return the chain; its logits are those that tokens were drawn from, None in a greedy run."""
        draft = self._unfinished()._replace(num_nodes=self.num_nodes)
        if not self._logits:
            return draft
        # The leaf has no children; what stands in its row is not read.
        return draft._replace(logits=torch.stack([*self._logits, self._logits[-1]], dim=1))

    def _unfinished(self) -> Draft:
        length, layout = self.length, self._layout
        ids = torch.stack(self._ids, dim=1)
        tables = layout.parents(length), layout.mask(length), layout.depths(length)
        return Draft(ids, *tables, length - 1, is_chain=True)
