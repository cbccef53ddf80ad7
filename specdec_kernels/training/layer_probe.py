"""Contexts from which every skip set drafts, and what it drafts there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoding.drafting import ChainLayout
from ..decoding.protocols import LayerPlan
from ..hf.target import HFTarget
from .data import is_held_out
from .generate import Conversation
from .layer_costs import Outcome

# Places in one text, at most; they are alike, so more of them would only seem to be more contexts.
CUTS = 8


@dataclass(frozen=True)
class SearchOptions:
    """What is searched; a study is continued only with the same options.

    Attributes:
        num_contexts: places in the model's own answers from which every skip set drafts.
        max_context: longest of them, in tokens.
        max_drafts: drafts from each.
        seed: of the sampler and of the places.
    """

    num_contexts: int = 64
    max_context: int = 256
    max_drafts: int = 8
    seed: int = 0


class DraftProbe:
    """Contexts in a target's cache, all in one batch, from which any skip set can draft.

    Args:
        model: the causal LM.
        contexts: token ids.
        max_drafts: ``N``, drafts from each context.
    """

    def __init__(self, model, contexts: Sequence[Sequence[int]], max_drafts: int):
        lengths = torch.tensor([len(context) for context in contexts], dtype=torch.int32, device=model.device)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(context) for context in contexts], batch_first=True)
        self.max_drafts = max_drafts
        self._target = HFTarget(model, len(contexts), ids.shape[1] + max_drafts)
        self._pending = self._target.prefill(ids.to(model.device), lengths).logits[:, 0].argmax(-1)
        self._layout = ChainLayout(max_drafts, model.device)
        self._truth, _ = self._draft(LayerPlan(), max_drafts)

    def outcome(self, plan: LayerPlan, num_drafts: int | None = None) -> Outcome:
        """Draft greedily with a skip set, and compare with what the whole model says."""
        count = self.max_drafts if num_drafts is None else num_drafts
        ids, probs = self._draft(plan, count)
        matched = (ids == self._truth[:, :count]).long().cumprod(1).sum(1)
        return Outcome(matched.cpu(), probs.cpu())

    def _draft(self, plan: LayerPlan, count: int) -> tuple[Tensor, Tensor]:
        """Return ``(B, count)`` ids and probabilities. Nothing is committed, so the contexts stay as they are."""
        ids, probs = [self._pending], []
        for last in range(count):
            mask, depths = self._layout.mask(last + 1), self._layout.depths(last + 1)[:, last:]
            output = self._target.run_layers(ids[-1][:, None], mask, depths, plan, first_node=last)
            best, token = output.logits[:, 0].float().max(-1)
            probs.append((best - output.logits[:, 0].float().logsumexp(-1)).exp())
            ids.append(token)
        return torch.stack(ids[1:], dim=1), torch.stack(probs, dim=1)


def choose_contexts(
    conversations: Sequence[Conversation], options: SearchOptions, *, held_out: bool
) -> list[tuple[int, ...]]:
    """Cut conversations somewhere in their answers; greedy answers first, since greedy drafts are counted.

    Where there are too few of them, each is cut in several places.

    Raises:
        ValueError: there is none.
    """
    generator = torch.Generator().manual_seed(options.seed)
    contexts: dict[tuple[int, ...], None] = {}  # in order, and each once
    for _ in range(CUTS):
        for c in sorted(conversations, key=lambda c: (not c.greedy, c.index)):
            cut = int(torch.randint(len(c.answer), (), generator=generator))
            context = c.prompt + c.answer[:cut]
            if is_held_out(c) == held_out and len(context) <= options.max_context:
                contexts[context] = None
        if len(contexts) >= options.num_contexts:
            break
    if not contexts:
        part = "held-out" if held_out else "other"
        raise ValueError(f"no {part} context of at most {options.max_context} tokens; ask for more tokens")
    return list(contexts)[: options.num_contexts]
