"""Draft what followed the same words before (prompt lookup): no model, no weights."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from torch import Tensor

from ..._validate import check_range
from ...types import Verification
from ..drafting import DraftContext
from ..dynamic_tree import check_min_prob
from ..host_trees import HostTree, draft_of
from ..protocols import Draft, TargetOutput

# Further places looked at for each branch wanted: many places of a frequent word go on alike.
_PLACES_PER_BRANCH = 4

# How often the token behind an n-gram that occurred before is what followed it then, for n = 1, 2 and more; and how
# often the next one is, as long as all before it were. From greedy texts of SmolLM2-135M on 60 prompts of Spec-Bench.
_FIRST_HITS, _NEXT_HITS = (0.26, 0.55, 0.78), (0.69, 0.74, 0.87)


def promising(length: int, max_drafts: int, min_prob: float) -> int:
    """Return how many tokens to draft behind a suffix: those that are accepted with a probability of ``min_prob``.

    Args:
        length: of the suffix that occurred before, at least 1.
        max_drafts: the most.
        min_prob: in [0, 1); 0 for all of them.
    """
    kind = min(length, len(_FIRST_HITS)) - 1
    prob, count = _FIRST_HITS[kind], 0
    while count < max_drafts and prob >= min_prob:
        prob, count = prob * _NEXT_HITS[kind], count + 1
    return count


class SuffixIndex:
    """Where in a text each n-gram has occurred, kept up while the text grows.

    Args:
        min_ngram, max_ngram: the lengths that are indexed.
        tokens: the text so far.

    Example:
        >>> index = SuffixIndex(1, 3, [5, 6, 7, 5, 6])
        >>> next(index.continuations(4))
        [7, 5, 6, 7]
    """

    def __init__(self, min_ngram: int, max_ngram: int, tokens: Sequence[int] = ()):
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        # n-gram → where the text goes on behind each of its occurrences, oldest first.
        self._starts: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        for token in tokens:
            end = len(self._tokens)
            for n in self._lengths:
                if n <= end:
                    self._starts.setdefault(tuple(self._tokens[end - n :]), []).append(end)
            self._tokens.append(token)

    def continuations(self, count: int | Mapping[int, int], places: int = 1) -> Iterator[list[int]]:
        """Yield the tokens that followed earlier occurrences of the text's suffix.

        The longest suffix comes first, its newest occurrence before older ones. An occurrence so near to the end that
        the text runs out goes on with what was just drafted: a loop is continued as a loop.

        Args:
            count: tokens to yield, at least 1; or how many for each length of the suffix.
            places: occurrences of each suffix to look at.
        """
        for n in self._lengths:
            if n > len(self._tokens):
                continue
            for start in islice(reversed(self._starts.get(tuple(self._tokens[-n:]), [])), places):
                period = len(self._tokens) - start
                number = count if isinstance(count, int) else count[n]
                yield [self._tokens[start + i % period] for i in range(number)]


class NGramDrafter:
    """Propose what followed the last tokens when they last occurred in the prompt or in the text so far.

    The longest suffix of at most ``max_ngram`` tokens that occurred before is looked up, its newest occurrence first
    (prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023, arXiv 2304.04487). Good where a text copies or repeats
    itself: summaries, code, retrieval. A row without a match drafts nothing. The drafts are deterministic, so
    `Draft.logits` is None and sampling stays exact.

    Runs on the host, from tokens that the loop has there anyway: nothing waits for the device.

    Args:
        max_ngram: the longest suffix looked up.
        min_ngram: the shortest.
        max_drafts: the most tokens drafted along a path.
        num_branches: so many different continuations, merged into a tree where they begin alike.
        min_prob: drafts end before the first token that is less likely, see `promising`: a suffix of a single token is
            a weak hint, and what follows it soon wrong. 0 drafts ``max_drafts`` tokens behind every match.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> NGramDrafter(max_drafts=10, num_branches=2).max_nodes
        21
    """

    def __init__(
        self,
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        max_drafts: int = 8,
        num_branches: int = 1,
        min_prob: float = 0.06,
    ):
        check_range("NGramDrafter", "max_ngram", max_ngram, 1, 1024)
        check_range("NGramDrafter", "min_ngram", min_ngram, 1, max_ngram)
        check_range("NGramDrafter", "num_branches", num_branches, 1, 1023)
        check_range("NGramDrafter", "max_drafts", max_drafts, 1, 1023 // num_branches)
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        check_min_prob("NGramDrafter", min_prob)
        self.max_drafts, self.num_branches, self.min_prob = max_drafts, num_branches, min_prob
        self._counts = {n: promising(n, max_drafts, min_prob) for n in range(min_ngram, max_ngram + 1)}
        self._context: DraftContext | None = None

    @property
    def max_nodes(self) -> int:
        """All branches in full length, and the root."""
        return self.max_drafts * self.num_branches + 1

    def bind(self, context: DraftContext) -> None:
        """Take the run: its rows tell what was emitted."""
        self._context = context

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Index the prompts."""
        rows = zip(prompt_ids.tolist(), prompt_len.tolist(), strict=True)
        self._texts = [SuffixIndex(self.min_ngram, self.max_ngram, ids[:length]) for ids, length in rows]
        self._num_indexed = [0] * len(self._texts)

    def propose(self, pending: Tensor) -> Draft:
        """Return the continuations below the pending tokens ``(B,) int64``, as wide as the longest row's.

        Raises:
            RuntimeError: there was no `bind` and `begin`.
        """
        return draft_of(self.trees(pending), pending.device)

    def drafts_on_host(self, pending: Tensor) -> bool:
        """Say that it always does."""
        return True

    def trees(self, pending: Tensor) -> list[HostTree]:
        """Do what `propose` does, in lists; what was emitted is known there, and ``pending`` not read."""
        if self._context is None:
            raise RuntimeError("NGramDrafter.propose: it works only inside decode, which calls bind and begin")
        return [self._tree(row, tokens) for row, tokens in enumerate(self._context.emitted)]

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Learn nothing: `propose` reads what was emitted."""

    def _tree(self, row: int, emitted: Sequence[int]) -> HostTree:
        """Return a row's tree."""
        ids, parents = [emitted[-1] if emitted else 0], [-1]
        if self._context is None or self._context.finished[row]:
            return HostTree(ids, parents)
        text = self._texts[row]
        text.extend(emitted[self._num_indexed[row] :])
        self._num_indexed[row] = len(emitted)
        children: dict[tuple[int, int], int] = {}
        branches = 0
        for path in text.continuations(self._counts, 1 if self.num_branches == 1 else _PLACES_PER_BRANCH):
            node, before = 0, len(ids)
            for token in path:
                if (node, token) not in children:
                    children[node, token] = len(ids)
                    ids.append(token)
                    parents.append(node)
                node = children[node, token]
            branches += len(ids) > before
            if branches == self.num_branches:
                break
        return HostTree(ids, parents)
