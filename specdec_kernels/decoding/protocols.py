"""The seams of a decode step: propose → forward → verify → compact → emit.

Letters: ``B`` batch, ``T`` tree nodes (root included), ``N`` longest path (root excluded), ``V`` vocabulary, ``C``
hidden size, ``W = ceil(T/64)`` mask words. Node 0 of a draft is the *pending token*: the last emitted one, whose K/V
is not in the cache yet.
"""

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
    """

    ids: Tensor
    parents: Tensor
    tree_mask: Tensor
    depths: Tensor
    max_depth: int
    logits: Tensor | None = None
    num_nodes: Tensor | None = None


class TargetOutput(NamedTuple):
    """The target's answer for the nodes it was given.

    Attributes:
        logits: ``(B, T, V)``; row *i* is the prediction after node *i*.
        hidden: ``(B, T, C)``; the final hidden states, after the last norm.
    """

    logits: Tensor
    hidden: Tensor


class Target(Protocol):
    """The model being accelerated, together with its KV cache. Every row of the batch has its own length."""

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


class Drafter(Protocol):
    """Proposes a draft for each step. Holds its own state for the batch between `begin` calls."""

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

        Rows with ``active == False`` (``(B,) bool``) have ended: their state is no longer asked for and must not grow.
        For the others ``num_accepted + 1`` ids were emitted, the last of which is the next pending token.
        """
        ...
