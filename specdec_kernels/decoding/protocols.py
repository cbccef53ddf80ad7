"""The seams of a decode step: propose → forward → verify → compact → emit.

Letters: ``B`` batch, ``T`` tree nodes (root included), ``N`` longest path (root excluded), ``V`` vocabulary, ``C``
hidden size, ``W = ceil(T/64)`` mask words. Node 0 of a draft is the *pending token*: the last emitted one, whose K/V
is not in the cache yet.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from ..types import Verification


class Draft(NamedTuple):
    """What a drafter proposes for one step; the same static shape for every row of the batch.

    Attributes:
        ids: ``(B, T) int64``; column 0 is the pending token.
        parents: ``(B or 1, T) int32``, topological, ``parents[:, 0] == -1``.
        tree_mask: ``(B or 1, T, W) int64``; bit *j* of row *i* is set iff *j* is *i* or an ancestor of *i*.
        depths: ``(B or 1, T) int32``; 0 for the root.
        max_depth: ``N``, a Python number (shapes depend on it).
        logits: ``(B, T, V)``: row *i* is the distribution from which node *i*'s children were drawn; None when the
            drafts were chosen deterministically.
        num_nodes: ``(B,) int32`` nodes in use of each row, None when all are.
        num_layers_run: so many of the target's first layers were run for all nodes while drafting; their K/V is cached.
        hidden: ``(B, T, C)``, what those layers gave; None when there are none.
        is_chain: a drawn chain, whatever was drawn; one that only became a chain by what was drawn is none.
    """

    ids: Tensor
    parents: Tensor
    tree_mask: Tensor
    depths: Tensor
    max_depth: int
    logits: Tensor | None = None
    num_nodes: Tensor | None = None
    num_layers_run: int = 0
    hidden: Tensor | None = None
    is_chain: bool = False


class TargetOutput(NamedTuple):
    """The target's answer for the nodes it was given.

    Attributes:
        logits: ``(B, T, V)``; row *i* is the prediction after node *i*.
        hidden: ``(B, T, C)``; the final hidden states, after the last norm.
        tapped: ``(B, L, C)``; of a prefill with `LayeredTarget.tap`: what the tapped layer gave for every prompt token.
    """

    logits: Tensor
    hidden: Tensor
    tapped: Tensor | None = None


class Target(Protocol):
    """The model being accelerated, together with its KV cache. Every row of the batch has its own length.

    One that can leave rows out also has ``run_only(rows: Sequence[int])``, which `decode` calls whenever rows have
    ended: from then on only these rows are looked at.
    """

    @property
    def prefix_len(self) -> Tensor:
        """``(B,) int32``: committed cache rows. A fresh tensor or one that callers do not write to."""
        ...

    @property
    def capacity(self) -> int:
        """Rows of the cache; ``prefix_len + T`` never exceeds it."""
        ...

    def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOutput:
        """Feed the prompts and commit them.

        Args:
            ids: ``(B, L) int64``, right-padded.
            lengths: ``(B,) int32``, 1…L.

        Returns:
            Logits and hidden states of each row's last prompt token (``T = 1``).
        """
        ...

    def forward(self, ids: Tensor, tree_mask: Tensor, depths: Tensor) -> TargetOutput:
        """Run the nodes after the committed prefix; K/V of node *i* goes to row ``prefix_len + i``. Commits nothing."""
        ...

    def commit(self, accepted: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        """Keep the root and the accepted nodes: move their rows home, advance the length by ``num_accepted + 1``.

        Rows with ``active == False`` (``(B,) bool``) are left as they are.
        """
        ...


@dataclass(frozen=True)
class LayerPlan:
    """Which layers of a target run.

    Attributes:
        start: layers before this one were run already.
        stop: layers from this one on are not run, nor the last norm and the projection; None for all.
        skipped_attention: layers whose attention block is left out: only the residual goes on.
        skipped_mlp: layers whose MLP is left out.
    """

    start: int = 0
    stop: int | None = None
    skipped_attention: frozenset[int] = frozenset()
    skipped_mlp: frozenset[int] = frozenset()


class LayeredTarget(Target, Protocol):
    """A target that drafters can run in part, over the same cache: what self-speculation needs."""

    @property
    def num_layers(self) -> int:
        """``L``."""
        ...

    def run_layers(
        self,
        ids: Tensor,
        tree_mask: Tensor,
        depths: Tensor,
        plan: LayerPlan,
        *,
        first_node: int = 0,
        hidden: Tensor | None = None,
    ) -> TargetOutput:
        """Run some of the layers for the nodes ``first_node`` … ``first_node + n − 1``; commits nothing.

        K/V of the layers that run goes to the rows of these nodes. Nodes before ``first_node`` are attended to through
        the cache, so the same layers must have been run for them in this step.

        Args:
            ids: ``(B, n) int64`` of these nodes.
            tree_mask: ``(B or 1, T, W) int64`` of all nodes up to these, ``T = first_node + n``.
            depths: ``(B or 1, n) int32`` of these nodes.
            plan: which layers.
            first_node: nodes of the step that come before.
            hidden: ``(B, n, C)``, what the layers before ``plan.start`` gave; None when that is 0.

        Returns:
            Logits and final hidden states of these nodes. With ``plan.stop``: no logits ``(B, 0, V)``, and what layer
            ``stop − 1`` gave.
        """
        ...

    def tap(self, layer: int) -> None:
        """Let `prefill` return, from now on, what the first ``layer`` layers gave for every token of the prompts."""
        ...

    def reserve(self, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return K and V rows of the drafter's own, ``(B, S, Hk, D)`` each, that `commit` moves with the others."""
        ...


class RewindableTarget(Target, Protocol):
    """A target that can forget committed rows: what a draft model needs."""

    def truncate(self, lengths: Tensor) -> None:
        """Forget the rows past ``lengths`` ``(B,) int32``, none above ``prefix_len``."""
        ...


class Drafter(Protocol):
    """Proposes a draft for each step. Holds its own state for the batch between `begin` calls.

    A drafter that runs the target itself, or draws its tokens, also has ``bind(context: DraftContext)``, which is
    called once, before the prefill. One that can draft in Python's lists says so as a `host_trees.HostDrafter`.
    """

    @property
    def max_nodes(self) -> int:
        """The largest ``T`` that `propose` may return; the cache is sized with it."""
        ...

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Start a batch: right-padded prompts ``(B, L)``, their lengths, and what `Target.prefill` returned."""
        ...

    def propose(self, pending: Tensor) -> Draft:
        """Draft from the pending tokens ``(B,) int64``."""
        ...

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Learn which nodes were accepted, after each step.

        ``draft`` is what was verified: the proposal, or the larger tree that `MergedDrafter` made of it.

        Rows with ``active == False`` (``(B,) bool``) have ended: their state is no longer asked for and must not grow.
        For the others ``num_accepted + 1`` ids were emitted, the last of which is the next pending token.
        """
        ...
