"""A language model small enough to read, with a cache that shows every misplaced row, and drafters that cheat."""

import torch
from torch import Tensor

from specdec_kernels.decoding.protocols import Draft, TargetOutput
from specdec_kernels.tree import DraftTree, unpack_mask

POISON = -7


class ToyTarget:
    """Predict from all cached ids and their order. The cache holds the ids themselves, `POISON` where none was written.

    A small chaotic recurrence, ``h ← tanh(A h + E[id])``, ``logits = W h``, over the context that the cache and the
    mask say a node has; so its text does not repeat.
    """

    def __init__(self, batch_size: int, capacity: int, vocab_size: int = 13, seed: int = 1, scale: float = 4.0):
        generator = torch.Generator().manual_seed(seed)
        self.embedding = 2 * torch.randn(vocab_size, 8, generator=generator, dtype=torch.float64)
        self.recurrence = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        self.weight = scale * torch.randn(vocab_size, 8, generator=generator, dtype=torch.float64)
        self.cache = torch.full((batch_size, capacity), POISON)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32)
        self.num_forwards = 0

    @property
    def prefix_len(self) -> Tensor:
        return self.lengths.clone()

    @property
    def capacity(self) -> int:
        return self.cache.shape[1]

    def next_logits(self, context: Tensor) -> Tensor:
        """Return ``(V,)`` after the ids ``(n,)``."""
        if (context < 0).any():
            return torch.full((len(self.weight),), torch.nan, dtype=torch.float64)
        state = torch.zeros(8, dtype=torch.float64)
        for token in context.tolist():
            state = torch.tanh(self.recurrence @ state + self.embedding[token])
        return self.weight @ state

    def plain(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Decode greedily without any of this package."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.next_logits(torch.tensor(ids)).argmax()))
        return ids[len(prompt) :]

    def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOutput:
        for row, length in enumerate(lengths.tolist()):
            self.cache[row, :length] = ids[row, :length]
        self.lengths = lengths.clone()
        logits = [self.next_logits(ids[row, :length]) for row, length in enumerate(lengths.tolist())]
        return self._output(torch.stack(logits)[:, None])

    def forward(self, ids: Tensor, tree_mask: Tensor, depths: Tensor) -> TargetOutput:
        batch, num_nodes = ids.shape
        assert int(self.lengths.max()) + num_nodes <= self.capacity, "a write past the capacity"
        self.num_forwards += 1
        visible = unpack_mask(tree_mask, num_nodes).expand(batch, -1, -1)
        assert torch.equal(visible.sum(-1, dtype=torch.int32) - 1, depths.expand(batch, -1))
        logits = torch.empty(batch, num_nodes, len(self.weight), dtype=torch.float64)
        for row, length in enumerate(self.lengths.tolist()):
            self.cache[row, length : length + num_nodes] = ids[row]
            for node in range(num_nodes):
                seen = torch.cat([torch.ones(length, dtype=torch.bool), visible[row, node]])
                logits[row, node] = self.next_logits(self.cache[row, : length + num_nodes][seen])
        return self._output(logits)

    def commit(self, accepted: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        for row in active.nonzero()[:, 0].tolist():
            length, count = int(self.lengths[row]), int(num_accepted[row])
            for i, node in enumerate(accepted[row, :count].tolist()):
                self.cache[row, length + 1 + i] = self.cache[row, length + node]
            self.lengths[row] = length + 1 + count
            self.cache[row, length + 1 + count :] = POISON

    def truncate(self, lengths: Tensor) -> None:
        assert (lengths <= self.lengths).all(), "rows that are not there"
        self.lengths = lengths.clone()
        for row, length in enumerate(lengths.tolist()):
            self.cache[row, length:] = POISON

    def _output(self, logits: Tensor) -> TargetOutput:
        return TargetOutput(logits.float(), torch.zeros(*logits.shape[:2], 1))


class CheatingDrafter:
    """Know what every row will say, and draft it along the path to the last leaf of a tree; or never draft it.

    Other nodes hold tokens that are wrong at their depth.
    """

    def __init__(self, tree: DraftTree, continuations: list[list[int]], vocab_size: int = 13, *, right: bool = True):
        self.tree, self.continuations, self.vocab_size = tree, continuations, vocab_size
        self.path = set(tree.path(tree.leaves[-1])) if right else set()
        self.emitted = [0] * len(continuations)

    @property
    def max_nodes(self) -> int:
        return self.tree.num_nodes

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        self.emitted = [1] * len(self.continuations)

    def propose(self, pending: Tensor) -> Draft:
        ids = torch.empty(len(pending), self.tree.num_nodes, dtype=torch.int64)
        for row, continuation in enumerate(self.continuations):
            for node, depth in enumerate(self.tree.depths):
                at = self.emitted[row] - 1 + depth
                right = continuation[at] if at < len(continuation) else 0
                wrong = (right + 1 + self.tree.ranks[node]) % self.vocab_size
                ids[row, node] = right if node in self.path or node == 0 else wrong
        ids[:, 0] = pending
        return draft_of(self.tree, ids)

    def observe(self, draft, output, verification, active) -> None:
        for row in active.nonzero()[:, 0].tolist():
            self.emitted[row] += int(verification.num_accepted[row]) + 1


def draft_of(tree: DraftTree, ids: Tensor, logits: Tensor | None = None) -> Draft:
    """Return the draft of ``ids (B, T)`` over a tree."""
    return Draft(
        ids,
        tree.to_parents_tensor()[None],
        tree.to_packed_mask()[None],
        tree.to_depths_tensor()[None],
        tree.max_depth,
        logits,
    )


def pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts right-padded with an id that must never be read, and their lengths."""
    width = max(map(len, prompts))
    ids = torch.tensor([prompt + [POISON] * (width - len(prompt)) for prompt in prompts])
    return ids, torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)


class TableTarget:
    """A second-order Markov model, ``logits = table[previous, last]``, fast enough for thousands of rows."""

    def __init__(self, table: Tensor, batch_size: int, capacity: int):
        self.table = table
        self.cache = torch.full((batch_size, capacity), POISON)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32)

    @property
    def prefix_len(self) -> Tensor:
        return self.lengths.clone()

    @property
    def capacity(self) -> int:
        return self.cache.shape[1]

    def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOutput:
        self.cache[:, : ids.shape[1]] = ids
        self.lengths = lengths.clone()
        last = lengths.long()[:, None] - 1
        return self._output(ids.gather(1, last - 1), ids.gather(1, last))

    def forward(self, ids: Tensor, tree_mask: Tensor, depths: Tensor) -> TargetOutput:
        num_nodes = ids.shape[1]
        ancestors = unpack_mask(tree_mask, num_nodes) & ~torch.eye(num_nodes, dtype=torch.bool)
        parents = (ancestors * torch.arange(num_nodes)).amax(-1).expand_as(ids)
        start = self.lengths.long()[:, None]
        self.cache.scatter_(1, start + torch.arange(num_nodes), ids)
        previous = torch.where(depths == 0, self.cache.gather(1, start - 1), ids.gather(1, parents))
        return self._output(previous, ids)

    def commit(self, accepted: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        start = self.lengths.long()
        for i in range(accepted.shape[1]):
            moving = (active & (num_accepted > i)).nonzero()[:, 0]
            nodes = accepted[moving, i].long()
            self.cache[moving, start[moving] + 1 + i] = self.cache[moving, start[moving] + nodes]
        self.lengths = torch.where(active, self.lengths + num_accepted + 1, self.lengths)

    def truncate(self, lengths: Tensor) -> None:
        assert (lengths <= self.lengths).all(), "rows that are not there"
        self.lengths = lengths.clone()

    def _output(self, previous: Tensor, last: Tensor) -> TargetOutput:
        return TargetOutput(self.table[previous, last], torch.zeros(*last.shape, 1))


def chi_square_excess(counts: Tensor, probs: Tensor) -> float:
    """Return how many standard deviations the chi-square statistic lies above what ``probs`` would give.

    Outcomes expected fewer than five times are taken together. Wilson and Hilferty's cube root makes it nearly normal.
    """
    counts, expected = counts.double().flatten(), probs.double().flatten() * counts.sum()
    assert (counts[expected == 0] == 0).all(), "an impossible outcome happened"
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = int(keep.sum()) - 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)
