"""The exact law of the tokens that a verification rule emits, by integrating over its uniforms.

The rule is a black box. By convention uniform i decides node i, so for given earlier decisions the result has at most
one breakpoint in it, found by bisection; the interval's length is the probability of the decision. Uniform 0 is swept
over the breakpoints of the final token in the same way.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from specdec_kernels import Verification, verify_chain, verify_tree

Verify = Callable[[Tensor], Verification]


class Language:
    """Random conditional distributions over a tiny vocabulary: ``logits[d]`` is ``(V,)*d + (V,)``, float64."""

    def __init__(self, vocab: int, depth: int, seed: int, spread: float = 1.5):
        generator = torch.Generator().manual_seed(seed)
        shapes = [(vocab,) * (d + 1) for d in range(depth + 1)]
        self.vocab, self.depth = vocab, depth
        self.logits = [spread * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def at_nodes(self, ids: Tensor, parents: Sequence[int]) -> Tensor:
        """Return the logits after every node of a tree, ``(R, T, V)``."""
        rows = [self.logits[len(path)][tuple(ids[:, list(path)].T)] for path in map(tuple, paths(parents))]
        return torch.stack([row.expand(ids.shape[0], self.vocab) for row in rows], dim=1)

    def joint(self, prefix: tuple[int, ...] = ()) -> Tensor:
        """Return the law of the tokens that follow a prefix, up to ``depth + 1`` in all."""
        law = self.logits[len(prefix)][prefix].softmax(-1)
        if len(prefix) == self.depth:
            return law
        return torch.stack([law[x] * self.joint((*prefix, x)) for x in range(self.vocab)])


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Return each node's path from below the root."""
    found: list[list[int]] = [[]]
    for node in range(1, len(parents)):
        found.append([*found[parents[node]], node])
    return found


def all_drafts(vocab: int, num_nodes: int) -> Tensor:
    """Return every filling of a tree, ``(V^(T-1), T)``; the root is 0."""
    return torch.tensor([(0, *x) for x in itertools.product(range(vocab), repeat=num_nodes - 1)])


def draft_weights(
    probs: Tensor,
    ids: Tensor,
    parents: Sequence[int],
    *,
    chosen: Mapping[int, int] = MappingProxyType({}),
    with_replacement: bool = False,
) -> Tensor:
    """Return the probability of each filling ``ids (R, T)`` when siblings are drawn in order from ``probs (R, T, V)``.

    Nodes in ``chosen`` are not drawn: they always hold that token.
    """
    weights = torch.ones(ids.shape[0], dtype=torch.float64)
    left = probs.double().clone()
    for node in range(1, len(parents)):
        x = ids[:, node, None]
        if node in chosen:
            weights *= x[:, 0] == chosen[node]
            continue
        law = left[:, parents[node]]
        total = law.sum(1)
        weights *= torch.where(total > 0, law.gather(1, x)[:, 0] / total, 0.0)
        if not with_replacement:
            law.scatter_(1, x, 0.0)
    return weights


def emitted_law(verify: Verify, ids: Tensor, language: Language, *, bits: int = 30, guide=None) -> Tensor:
    """Return for each row of ``ids (R, T)`` the joint law of ``depth + 1`` tokens, ``(R, V, …, V)``.

    Where fewer tokens are emitted, the rest is sampled from the language.

    Args:
        verify: takes uniforms ``(R·k, T)`` float64, whose row ``r·k + j`` goes with row r of ``ids``.
        bits: resolution of the uniforms; 23 for kernels that take fp32.
        guide: a rule that says where the breakpoints are, for a ``verify`` that is slow to ask: it is asked on both
            sides of each only, at a distance of 2^-bits, and fails an assertion where it disagrees.
    """
    num_rows, num_nodes = ids.shape
    find = Bisection(bits)
    if guide is not None:
        known = Bisection(30)
        uniforms, _ = _decisions(guide, num_rows, num_nodes, known)
        _final_tokens(guide, uniforms, language.vocab, known)
        find = Confirmation(bits, known.found)
    uniforms, weights = _decisions(verify, num_rows, num_nodes, find)
    final = _final_tokens(verify, uniforms, language.vocab, find)
    result = verify(uniforms.flatten(0, 1))
    law = torch.zeros((num_rows, *(language.vocab,) * (language.depth + 1)), dtype=torch.float64)
    histories = uniforms.shape[1]
    for index, count in enumerate(result.num_accepted.tolist()):
        row, history = divmod(index, histories)
        prefix = tuple(result.output_ids[index, :count].tolist())
        for x in range(language.vocab):
            weight = weights[row, history] * final[row, history, x]
            if weight > 0:
                tokens = (*prefix, x)
                rest = language.joint(tokens) if len(tokens) <= language.depth else 1.0
                law[(row, *tokens)] += weight * rest
    return law


def mean_accepted(verify: Verify, ids: Tensor, *, bits: int = 30) -> Tensor:
    """Return the mean number of accepted nodes for each row of ``ids (R, T)``, ``(R,)``."""
    uniforms, weights = _decisions(verify, *ids.shape, Bisection(bits))
    counts = verify(uniforms.flatten(0, 1)).num_accepted.view(weights.shape)
    return (weights * counts).sum(1)


def _decisions(verify: Verify, num_rows: int, num_nodes: int, find: "Bisection") -> tuple[Tensor, Tensor]:
    """Return uniforms that stand for every history of decisions, ``(R, H, T)``, and their probabilities ``(R, H)``."""
    top = 1 - 2.0**-find.bits
    uniforms = torch.full((num_rows, 1, num_nodes), top, dtype=torch.float64)
    uniforms[..., 0] = 0.5
    weights = torch.ones(num_rows, 1, dtype=torch.float64)
    for node in range(1, num_nodes):
        edge = find(_same_as_at_zero(verify, uniforms, node), weights.shape)
        below, above = uniforms.clone(), uniforms.clone()
        below[..., node], above[..., node] = edge / 2, ((1 + edge) / 2).clamp(max=top)
        uniforms = torch.cat([below, above], dim=1)
        weights = torch.cat([weights * edge, weights * (1 - edge)], dim=1)
        happens = (weights > 0).any(0)
        uniforms, weights = uniforms[:, happens], weights[:, happens]
    return uniforms, weights


def _same_as_at_zero(verify: Verify, uniforms: Tensor, node: int) -> Callable[[Tensor], Tensor]:
    """Return a test of the uniforms of one node: are the same nodes accepted as with 0?"""

    def accepted(u: Tensor) -> Tensor:
        trial = uniforms.clone()
        trial[..., node] = u
        return verify(trial.flatten(0, 1)).accepted.unflatten(0, uniforms.shape[:2])

    at_zero = accepted(torch.zeros(uniforms.shape[:2], dtype=torch.float64))
    return lambda u: (accepted(u) == at_zero).all(-1)


def _final_tokens(verify: Verify, uniforms: Tensor, vocab: int, find: "Bisection") -> Tensor:
    """Return the law of the final token for every history, ``(R, H, V)``."""
    shape = (*uniforms.shape[:2], vocab - 1)
    largest = torch.arange(vocab - 1)

    def is_at_most(u: Tensor) -> Tensor:
        trial = uniforms[:, :, None].repeat(1, 1, vocab - 1, 1)
        trial[..., 0] = u
        result = verify(trial.flatten(0, 2))
        tokens = result.output_ids.gather(1, result.num_accepted[:, None].long())
        return tokens.view(shape) <= largest

    edges = find(is_at_most, shape)
    return torch.diff(edges, dim=-1, prepend=torch.zeros(*shape[:2], 1), append=torch.ones(*shape[:2], 1))


class Bisection:
    """Find where a test that holds up to some point of [0, 1] ceases to hold: 0 never holds, 1 always."""

    def __init__(self, bits: int):
        self.bits = bits
        self.found: list[Tensor] = []

    def __call__(self, is_below: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Tensor:
        low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
        for _ in range(self.bits):
            middle = (low + high) / 2
            holds = is_below(middle)
            low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
        # The last multiple of 2^-bits is the largest uniform there is: if the test holds there, it always does.
        step = 2.0**-self.bits
        self.found.append(torch.where(low >= 1 - step, 1.0, torch.where(high <= step, 0.0, high)))
        return self.found[-1]


class Confirmation(Bisection):
    """Ask on both sides of points that are known already, two steps of the uniforms away."""

    def __init__(self, bits: int, known: Sequence[Tensor]):
        super().__init__(bits)
        self._known = list(known)

    def __call__(self, is_below: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Tensor:
        edge, step = self._known.pop(0), 2.0**-self.bits
        assert edge.shape == torch.Size(shape)
        below, above = edge - step, edge + step
        assert (is_below(below.clamp(min=0)) | (below <= 0)).all()
        assert (~is_below(above.clamp(max=1 - step)) | (above >= 1)).all()
        return edge


class Setting:
    """A target, a drafter, all fillings of a tree with their probabilities, and the rule that judges them.

    Options of the methods are the rule's: ``sampled`` (draft logits are passed), ``chain``, ``block``.
    """

    def __init__(self, parents, vocab, *, temperature=1.0, dtype=torch.float64, with_replacement=False, seed=1):
        depth = 2 if any(parent > 0 for parent in parents) else 1
        self.parents, self.temperature, self.with_replacement = parents, temperature, with_replacement
        self.target, drafter = Language(vocab, depth, seed), Language(vocab, depth, seed + 100)
        self.ids = all_drafts(vocab, len(parents))
        # As if the models gave these logits, and dividing them by the temperature gave the law.
        self.target_logits = (self.target.at_nodes(self.ids, parents) * temperature).to(dtype)
        self.draft_logits = (drafter.at_nodes(self.ids, parents) * temperature).to(dtype)
        self.probs = (self.draft_logits.double() / temperature).softmax(-1)
        self.draw_from(self.probs, with_replacement=with_replacement)

    def draw_from(self, probs: Tensor, **how) -> None:
        """Let the drafts come from ``probs (R, T, V)``, whatever the rule is told (`draft_weights`)."""
        self.weights = draft_weights(probs, self.ids, self.parents, **how)

    def error(self, bits: int = 30, guide=None, **options) -> float:
        """Return the largest difference between the law over randomly drawn fillings and the target's."""
        rows, weights = self._drawn()
        law = torch.einsum("r,r...->...", weights, self._law(rows, bits, guide, options))
        return (law - self.target.joint()).abs().max().item()

    def worst_error(self, bits: int = 30, guide=None, **options) -> float:
        """Return the largest difference for any single filling: small only if the law does not depend on it."""
        law = self._law(torch.arange(self.ids.shape[0]), bits, guide, options)
        return (law - self.target.joint()).abs().max().item()

    def accepted(self, **options) -> float:
        """Return the mean number of accepted drafts over randomly drawn fillings."""
        rows, weights = self._drawn()
        return (weights * mean_accepted(self._rule(rows, **options), self.ids[rows])).sum().item()

    def _law(self, rows: Tensor, bits: int, guide, options) -> Tensor:
        """Return `emitted_law` of the rule; ``guide``: the chain's and the tree's op to ask for breakpoints."""
        known = None if guide is None else self._rule(rows, ops=guide, **options)
        return emitted_law(self._rule(rows, **options), self.ids[rows], self.target, bits=bits, guide=known)

    def _drawn(self) -> tuple[Tensor, Tensor]:
        rows = (self.weights > 0).nonzero()[:, 0]
        assert abs(self.weights.sum().item() - 1) < 1e-6
        return rows, self.weights[rows]

    def _rule(self, rows, *, sampled=True, chain=False, block=False, ops=(verify_chain, verify_tree)) -> Verify:
        def verify(uniforms: Tensor) -> Verification:
            copies = rows.repeat_interleave(uniforms.shape[0] // len(rows))
            ids, target, draft = self.ids[copies], self.target_logits[copies], self.draft_logits[copies]
            temperature = torch.full(copies.shape, self.temperature)
            if chain:
                laws = draft[:, :-1] if sampled else None
                return Verification(*ops[0](ids[:, 1:], target, laws, temperature, uniforms, block=block))
            parents, laws = torch.tensor([self.parents], dtype=torch.int32), draft if sampled else None
            options = {"with_replacement": self.with_replacement}
            return Verification(*ops[1](ids, parents, target, laws, temperature, uniforms, **options))

        return verify
