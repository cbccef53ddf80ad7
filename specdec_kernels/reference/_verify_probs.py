"""Distributions and draws of the verification reference: one node per row, float64."""

import math

import torch
from torch import Tensor

# Dividing by a smaller temperature says nothing more than argmax, and overflows in narrow formats.
GREEDY_BELOW = 1e-5
# Less than 2^-1020 of the likeliest id is nothing: whether a draft can have been drawn at all must not depend on which
# numbers below float64's normal ones an exponential still returns.
LOG_NOTHING = -1020 * math.log(2)


def needed(rows: Tensor) -> bool:
    """Say whether the work for these rows must be done: always on a device, else if any row asks for it."""
    return rows.device.type != "cpu" or bool(rows.any())


def greedy_rows(temperature: Tensor) -> Tensor:
    """Say which rows are greedy, ``(B,) bool``."""
    return temperature < GREEDY_BELOW


def target_probs(logits: Tensor, node: Tensor, temperature: Tensor) -> Tensor:
    """Return p after ``node`` of each row, ``(B, V)``; one-hot at the first argmax for greedy rows.

    A row without a finite maximum (a NaN, +inf, or nothing but −inf) cannot be judged: it comes back as NaN.
    """
    row = _row(logits, node)
    probs = _softmax(row, temperature)
    is_greedy = greedy_rows(temperature)[:, None] & ~probs[:, :1].isnan()
    if needed(is_greedy):
        best = torch.zeros_like(probs).scatter_(1, row.double().argmax(1, keepdim=True), 1.0)
        probs = torch.where(is_greedy, best, probs)
    return probs


def draft_probs(logits: Tensor, node: Tensor, temperature: Tensor, vocab: int, vocab_map: Tensor | None) -> Tensor:
    """Return the q from which the children of ``node`` were drawn, over the target's vocabulary, ``(B, V)``.

    Zero for greedy rows: what they draft is judged as chosen, not drawn.
    """
    # A leaf has no children and a chain's last node no row: which one is read there does not matter.
    probs = _softmax(_row(logits, node.clamp(max=logits.shape[1] - 1)), temperature)
    probs.masked_fill_(greedy_rows(temperature)[:, None], 0.0)
    if vocab_map is None:
        return probs
    ids = torch.arange(vocab_map.shape[0], device=vocab_map.device) + vocab_map
    is_inside = (ids >= 0) & (ids < vocab)
    ids = ids.clamp(0, vocab - 1).expand_as(probs)
    spread = probs.new_zeros(probs.shape[0], vocab).scatter_add_(1, ids, torch.where(is_inside, probs, 0.0))
    return torch.where(probs[:, :1].isnan(), torch.nan, spread)


def drafted_from(q: Tensor | None, p: Tensor, x: Tensor) -> Tensor:
    """Return the distribution that the drafts ``x (B, 1)`` came from, ``(B, V)``.

    It is q where x can have been drawn from q. Otherwise the drafter chose x in some other way, and one-hot is exact
    for any choice made without looking at the uniforms.
    """
    one_hot = torch.zeros_like(p).scatter_(1, x, 1.0)
    return one_hot if q is None else torch.where(q.gather(1, x) == 0, one_hot, q)


def residual(p: Tensor, law: Tensor, rows: Tensor) -> Tensor:
    """Return p with ``norm(max(p − law, 0))`` in these rows; where nothing remains, p stays."""
    rest = (p - law).clamp_(min=0)
    total = rest.sum(1, keepdim=True)
    return torch.where(rows[:, None] & (total > 0), rest / total, p)


def without(q: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Return q with x removed and the rest renormalised in these rows; zero once nothing remains."""
    rest = q.scatter(1, x, 0.0)
    total = rest.sum(1, keepdim=True)
    return torch.where(rows[:, None], rest / torch.where(total > 0, total, 1.0), q)


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Return the first id whose cumulative probability exceeds ``u`` of the total, ``(B,)``.

    Ids with ``p == 0`` are never drawn, however sums are rounded and however close ``u`` is to 1.
    """
    cumulative = torch.where(p > 0, p.cumsum(1), 0.0)
    total = cumulative.amax(1, keepdim=True)
    level = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > level).to(torch.int8).argmax(1)


def _row(logits: Tensor, node: Tensor) -> Tensor:
    return logits[torch.arange(logits.shape[0], device=logits.device), node]


def _softmax(row: Tensor, temperature: Tensor) -> Tensor:
    divisor = torch.where(greedy_rows(temperature), 1.0, temperature.double())
    scaled = row.double() / divisor[:, None]
    is_nothing = scaled - scaled.amax(1, keepdim=True) < LOG_NOTHING
    return torch.softmax(scaled.masked_fill_(is_nothing, -torch.inf), 1)
