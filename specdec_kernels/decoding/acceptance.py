"""Rules of acceptance: which drafted tokens are kept. Each is a thin choice among the verification ops."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ops.verify import verify_chain, verify_tree, verify_tree_greedy, verify_tree_typical
from ..reference._verify_probs import greedy_rows
from ..types import Verification
from .protocols import Draft


class Acceptance(Protocol):
    """Judges one step."""

    def __call__(self, draft: Draft, target_logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Verification:
        """Decide which nodes of a draft are accepted.

        Args:
            draft: the tree, ``(B, T)``.
            target_logits: ``(B, T, V)``; row *i* is the target's prediction after node *i*, already processed.
            temperature: ``(B,) fp32``; 0 is greedy.
            uniforms: ``(B, T)`` in (0, 1), from `randomness.uniforms_at`; column *i* decides node *i*, column 0 makes
                the final draw.

        Returns:
            A `Verification` with ``N = draft.max_depth``.
        """
        ...


@dataclass(frozen=True)
class GreedyAcceptance:
    """Keep what the target's argmax would have said, whatever the temperature. Exact for greedy decoding."""

    def __call__(self, draft: Draft, target_logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Verification:
        return _trim(verify_tree_greedy(draft.ids, draft.parents, target_logits, draft.num_nodes), draft)


@dataclass(frozen=True)
class RejectionAcceptance:
    """Rejection sampling: emitted tokens follow the target's distribution exactly; greedy where temperature is 0.

    Attributes:
        with_replacement: siblings were drawn independently of each other; default: without replacement.
        block: verify drawn chains (`Draft.is_chain`) as a block, which accepts more of them; trees and what was
            merged are not affected, and of chosen tokens it could accept no more.
        draft_vocab_map: ``(V',) int64`` offsets for drafters with a vocabulary of their own, see `verify_tree`.
    """

    with_replacement: bool = False
    block: bool = False
    draft_vocab_map: Tensor | None = None

    def __call__(self, draft: Draft, target_logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Verification:
        vocab_map = None if draft.logits is None else self.draft_vocab_map
        if self.block and draft.is_chain:
            return verify_chain(
                draft.ids[:, 1:],
                target_logits,
                None if draft.logits is None else draft.logits[:, :-1],
                temperature,
                uniforms,
                None if draft.num_nodes is None else (draft.num_nodes - 1).clamp(min=0),
                block=True,
                draft_vocab_map=vocab_map,
            )
        verification = verify_tree(
            draft.ids,
            draft.parents,
            target_logits,
            draft.logits,
            temperature,
            uniforms,
            draft.num_nodes,
            with_replacement=self.with_replacement,
            draft_vocab_map=vocab_map,
        )
        return _trim(verification, draft)


@dataclass(frozen=True)
class TypicalAcceptance:
    """Keep what is not improbable for the target (Medusa). Faster than exact sampling and not the same distribution.

    Attributes:
        epsilon: a token above this probability is always kept.
        delta: scale of the threshold ``delta · exp(−entropy)``, which is lower where the target is undecided.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __call__(self, draft: Draft, target_logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Verification:
        verification = verify_tree_typical(
            draft.ids,
            draft.parents,
            target_logits,
            temperature,
            uniforms,
            draft.num_nodes,
            epsilon=self.epsilon,
            delta=self.delta,
        )
        return _trim(verification, draft)


def _trim(verification: Verification, draft: Draft) -> Verification:
    """Cut the padding to the longest path that the tree has; the ops do not know it and return T columns."""
    output_ids, num_accepted, accepted = verification
    longest = draft.max_depth
    return Verification(output_ids[:, : longest + 1].contiguous(), num_accepted, accepted[:, :longest].contiguous())


def emitted_logprobs(verification: Verification, target_logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the target's log-probability of every emitted token.

    Always log p of the row that the token was chosen from, never of the residual: a recovered token has the probability
    that plain sampling would have given it.

    Args:
        verification: of this step.
        target_logits: ``(B, T, V)``, as they were judged.
        temperature: ``(B,) fp32``; greedy rows (below 1e-5) are taken at temperature 1.

    Returns:
        ``(B, N+1)``, fp32 or the logits' wider dtype; NaN behind the last emitted token.
    """
    output_ids, _, accepted = verification
    # The root chose the first token, each accepted node the one after it.
    rows = torch.nn.functional.pad(accepted.clamp(min=0).long(), (1, 0))
    logits = target_logits[torch.arange(rows.shape[0], device=rows.device)[:, None], rows]
    divisor = torch.where(greedy_rows(temperature), 1.0, temperature)[:, None, None]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logprobs = torch.log_softmax(logits.to(dtype) / divisor.to(dtype), -1)
    chosen = logprobs.gather(2, output_ids.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(output_ids < 0, torch.nan)
