"""How often each candidate of each head is right: what a draft tree is chosen by."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from .hidden import IGNORED, HiddenStates
from .losses import CHUNK_ROWS

MAX_RANK = 10


def label_ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the rank (0 is best) of each label among its logits; equal logits rank by ascending row.

    Args:
        logits: ``(n, V)``.
        labels: ``(n,) int64`` rows in ``[0, V)``.
    """
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    return ((logits > own) | ((logits == own) & earlier)).sum(-1)


class RankCounter:
    """Count at which rank the labels of each head are found.

    Attributes:
        counts: ``(M, max_rank) int64``.
        totals: ``(M,) int64`` labels seen; those the heads cannot propose, or rank lower, are in here only.
    """

    def __init__(self, num_heads: int, max_rank: int = MAX_RANK):
        self.counts = torch.zeros(num_heads, max_rank, dtype=torch.int64)
        self.totals = torch.zeros(num_heads, dtype=torch.int64)

    def add(self, head: int, logits: Tensor, labels: Tensor, num_labels: int) -> None:
        """Count the labels that the heads can propose; ``num_labels`` counts the others too."""
        ranks = label_ranks(logits, labels)
        max_rank = self.counts.shape[1]
        self.counts[head] += torch.bincount(ranks.clamp_max(max_rank), minlength=max_rank + 1)[:max_rank].cpu()
        self.totals[head] += num_labels

    def accuracies(self) -> list[list[float]]:
        """Return ``[head][rank]``: the share of labels that are the head's candidate of this rank (not cumulated)."""
        shares = self.counts.double() / self.totals.clamp_min(1)[:, None]
        return [[round(p, 6) for p in row] for row in shares.tolist()]


@torch.no_grad()
def measure_accuracies(
    heads, weight: Tensor | None, states: HiddenStates, rows: Iterable[int] | Tensor, max_rank: int = MAX_RANK,
    counter: RankCounter | None = None,
) -> RankCounter:  # fmt: skip
    """Measure the heads on cached rows.

    Every label of the full vocabulary counts. With ``heads.vocab_map`` a token that the heads cannot propose is a miss.

    Args:
        heads: `MedusaHeads`.
        weight: ``(V', C)`` of the shared ``lm_head`` (after `select_rows`), None for heads with their own projection.
        states: the cache.
        rows: row numbers.
        max_rank: candidates to count.
        counter: counts to add to.
    """
    rows = torch.as_tensor(rows)
    device = heads.w_res.device
    projection = heads.w_out if weight is None else weight
    counter = counter or RankCounter(heads.num_heads, min(max_rank, projection.shape[-2]))
    to_row = row_of_token(heads, device)
    chunk = CHUNK_ROWS.get(device.type, 1024)
    for start in range(0, len(rows), chunk):
        picked = rows[start : start + chunk]
        labels = states.labels(picked, heads.num_heads).to(device)
        hidden = states_of_heads(heads, states, picked, heads.w_res.dtype)
        for head in range(heads.num_heads):
            known = labels[:, head] != IGNORED
            target = labels[known, head] if to_row is None else to_row[labels[known, head]]
            proposable = target != IGNORED
            own = projection if projection.dim() == 2 else projection[head]
            logits = hidden[known, head][proposable].to(own.dtype) @ own.T
            counter.add(head, logits.float(), target[proposable], int(known.sum()))
    return counter


def states_of_heads(heads, states: HiddenStates, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the heads make of cached rows in some dtype, ``(n, M, C)``, on their device. Differentiable."""
    options = {"device": heads.w_res.device, "dtype": dtype}
    root = states.roots(rows).to(**options) if heads.root_conditioned else None
    return heads.hidden_states(states.hidden[rows].to(**options), root)


def row_of_token(heads, device: torch.device) -> Tensor | None:
    """Return ``(V,) int64``: the projection row of each token, −100 for tokens without one; None when all have one."""
    if heads.vocab_map is None:
        return None
    to_row = torch.full((heads.vocab_size,), IGNORED, device=device)
    to_row[heads.vocab_map.to(device)] = torch.arange(len(heads.vocab_map), device=device)
    return to_row


def format_accuracies(accuracies: list[list[float]], totals: list[int], ahead: int = 2) -> str:
    """Return a table: for each head how often the label is among its best 1, 2, 3, … candidates.

    ``ahead`` is how many tokens after the last known one the first head predicts.
    """
    columns = [k for k in (1, 2, 3, 4, 5, 6, 8, 10) if k <= len(accuracies[0])]
    lines = ["head  token  " + "".join(f"{f'top-{k}':>8}" for k in columns) + "    tokens"]
    for head, (row, total) in enumerate(zip(accuracies, totals, strict=True)):
        shares = "".join(f"{sum(row[:k]):8.3f}" for k in columns)
        lines.append(f"{head + 1:>4}  {f't+{head + ahead}':>5}  {shares}{total:>10,}")
    return "\n".join(lines)


def save_accuracies(path: str | Path, accuracies: list[list[float]], **metadata) -> None:
    """Write ``{"heads": [[p(rank 0), p(rank 1), …], …], …metadata}``: marginal accuracies of each head and rank."""
    entries = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in metadata.items())
    rows = ",\n".join("    " + json.dumps(row) for row in accuracies)
    Path(path).write_text(f'{{\n  "heads": [\n{rows}\n  ]{"," if entries else ""}\n{entries}\n}}\n')
