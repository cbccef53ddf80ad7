"""The logits processors of ``generate``, applied to the nodes of a draft tree."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ..decoding.protocols import Draft

# Processors that do not look at the context; some are missing in older versions of transformers. Only these very
# classes: a subclass may look.
_CONTEXT_FREE = {
    getattr(logits_process, name, None)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
}


class NodeLogits:
    """Process the logits after a node of each row as ``generate`` would if the path to that node were emitted.

    A processor sees ``(B, width)`` ids and ``(B, V)`` logits in fp32, as in ``generate``: all rows, with the left
    padding of the prompts. Rows are of different lengths here, so it is called once for each width, and only the rows
    of that width are used; the others are cut there, or filled with padding as finished rows are. It may be called for
    tokens that are rejected in the end, so it must be a function of its arguments.

    Args:
        processors: as ``generate`` prepared them.
        input_ids: ``(B, P)``, the prompts as ``generate`` has them.
        pad_id: fills short rows.
    """

    def __init__(self, processors: LogitsProcessorList, input_ids: Tensor, pad_id: int):
        # transformers annotates ids as LongTensor, which no operator of torch returns; hence Any.
        self._runs: list[tuple[bool, Any]] = [
            (is_free, LogitsProcessorList(run))
            for is_free, run in groupby(processors, key=lambda processor: type(processor) in _CONTEXT_FREE)
        ]
        self._input_ids, self._pad_id = input_ids, pad_id
        self._tree: tuple[Draft, list[list[int]], list[list[int]]] | None = None

    def __call__(self, logits: Tensor, nodes: Tensor, *, draft: Draft, emitted: Sequence[Sequence[int]]) -> Tensor:
        """See `specdec_kernels.decoding.loop.ProcessLogits`. Waits for the device iff a processor needs the context."""
        scores = logits.to(device=self._input_ids.device, dtype=torch.float32, copy=True)
        contexts: list[list[int] | None] | None = None
        for is_free, processors in self._runs:
            if is_free:
                scores = processors(self._input_ids, scores)
                continue
            if contexts is None:
                contexts = self._contexts(nodes.tolist(), draft, emitted)
            scores = self._with_context(processors, scores, contexts)
        return scores.to(logits.device)

    def _with_context(self, processors: Any, scores: Tensor, contexts: list[list[int] | None]) -> Tensor:
        result = scores
        for length in sorted({len(context) for context in contexts if context is not None}):
            rows = [row for row, context in enumerate(contexts) if context is not None and len(context) == length]
            filled = [((context or []) + [self._pad_id] * length)[:length] for context in contexts]
            new_ids = torch.tensor(filled, dtype=self._input_ids.dtype, device=scores.device).view(len(filled), length)
            processed = processors(torch.cat([self._input_ids, new_ids], dim=1), scores.clone())
            if len(rows) == len(contexts):
                return processed
            result = result.index_copy(0, torch.tensor(rows, device=scores.device), processed[rows])
        return result

    def _contexts(self, nodes: list[int], draft: Draft, emitted: Sequence[Sequence[int]]) -> list[list[int] | None]:
        """Return what each row has emitted on the way to its node, None for rows whose node is −1."""
        if self._tree is None or self._tree[0] is not draft:
            self._tree = (draft, draft.ids.tolist(), draft.parents.tolist())
        _, ids, parents = self._tree
        contexts: list[list[int] | None] = []
        for row, node in enumerate(nodes):
            path: list[int] = []
            while node > 0:
                path.append(ids[row][node])
                node = parents[row if len(parents) > 1 else 0][node]
            contexts.append(None if node < 0 else [*emitted[row], *reversed(path)])
        return contexts
