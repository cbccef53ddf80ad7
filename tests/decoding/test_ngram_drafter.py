"""Prompt lookup: what is found, in which order, and that drafts change neither texts nor laws."""

import pytest
import torch

from specdec_kernels.decoding import DecodeStats, GreedyAcceptance, RejectionAcceptance, decode
from specdec_kernels.decoding.drafters import NGramDrafter
from specdec_kernels.decoding.drafters.ngram import SuffixIndex, promising
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents

from .test_drafting import context_of, decoded
from .test_loop_law import LIMIT, law_of, sample, table  # noqa: F401 (a fixture)
from .toy import TableTarget, ToyTarget, chi_square_excess, pad

# Ends as the prompt of the law does, and has been there before, going on in two ways.
REPETITIVE = (1, 4, 2, 1, 4, 0, 3, 1, 4)


def started(prompts, emitted, finished=None, **options):
    """Return a drafter in the middle of a run."""
    drafter = NGramDrafter(**options)
    context = context_of(len(prompts), finished, is_greedy=True)
    context.emitted[:] = emitted
    drafter.bind(context)
    drafter.begin(*pad(prompts), None)
    return drafter


def propose(drafter):
    return drafter.propose(torch.tensor([tokens[-1] if tokens else 0 for tokens in drafter._context.emitted]))


def test_the_longest_suffix_comes_first_and_its_newest_place():
    index = SuffixIndex(1, 3, [7, 5, 6, 1, 5, 6, 2, 9, 6, 3, 7, 5, 6])
    by_length = {3: [[1, 5]], 2: [[2, 9], [1, 5]], 1: [[3, 7], [2, 9], [1, 5]]}
    assert list(index.continuations(2, places=9)) == by_length[3] + by_length[2] + by_length[1]
    assert list(index.continuations(2, places=1)) == [[1, 5], [2, 9], [3, 7]]
    assert list(SuffixIndex(2, 2, [7, 5, 6, 1, 5, 6]).continuations(3)) == [[1, 5, 6]]


def test_a_text_grows_as_if_it_had_been_given_at_once():
    text = torch.randint(0, 3, (60,)).tolist()
    grown = SuffixIndex(1, 4)
    for start in range(0, 60, 7):
        grown.extend(text[start : start + 7])
    whole = SuffixIndex(1, 4, text)
    assert list(grown.continuations(5, 9)) == list(whole.continuations(5, 9))


def test_a_loop_is_continued_as_a_loop():
    assert next(SuffixIndex(1, 3, [9, 1, 2, 3, 1, 2, 3, 1, 2]).continuations(7)) == [3, 1, 2, 3, 1, 2, 3]
    assert next(SuffixIndex(1, 3, [4, 4]).continuations(5)) == [4] * 5


@pytest.mark.parametrize("text", [[], [5], [1, 2, 3]])
def test_nothing_is_found_where_nothing_was(text):
    assert list(SuffixIndex(1, 3, text).continuations(4)) == []


def test_rows_draft_what_they_find_and_ended_rows_nothing():
    prompts = [[5, 6, 7, 8, 5], [1, 2, 3], [5, 6, 7, 8, 5], [3, 4, 3]]
    drafter = started(prompts, [[6], [4], [6], [4, 3]], [False, False, True, False], max_drafts=4)
    draft = propose(drafter)
    assert draft.num_nodes.tolist() == [5, 1, 1, 5]
    assert draft.ids[0].tolist() == [6, 7, 8, 5, 6]
    assert draft.ids[3].tolist() == [3, 4, 3, 4, 3]
    assert draft.ids[:, 0].tolist() == [6, 4, 6, 3]
    assert draft.max_depth == 4
    assert draft.logits is None
    assert torch.equal(draft.tree_mask, mask_from_parents(draft.parents))
    assert torch.equal(draft.depths, depths_from_mask(draft.tree_mask))


def test_what_was_emitted_is_looked_up_too():
    drafter = started([[1, 2]], [[3, 7, 3]], max_drafts=2)
    assert propose(drafter).ids.tolist() == [[3, 7, 3]]
    drafter._context.emitted[0] += [7, 9, 3]
    assert propose(drafter).ids.tolist() == [[3, 7, 9]]


def test_the_longer_the_suffix_the_longer_the_draft():
    """Tokens behind a single one are drafted as long as they are likely, those behind a longer suffix further."""
    text = [1, 2, 3, 9, 8, 7, 6, 5, 4, 19, 18, 17, 16, 15, 14]
    lengths = {n: propose(started([text + text[3 - n : 2]], [[3]], max_drafts=10)).ids.shape[1] for n in (1, 2, 3)}
    assert lengths == {n: 1 + promising(n, 10, 0.06) for n in (1, 2, 3)}
    assert 1 < lengths[1] < lengths[2] < lengths[3] == 11
    whole = propose(started([[*text, 1]], [[3]], max_drafts=10, min_prob=0.0))
    assert whole.ids[0].tolist() == [3, *text[3:13]]
    assert propose(started([[*text, 1]], [[3]], min_prob=0.5)).ids.tolist() == [[3]], "a single token: not so likely"


def test_drafts_end_before_the_first_token_that_is_too_unlikely():
    assert [promising(n, 8, 0.0) for n in (1, 2, 3, 9)] == [8] * 4
    assert [promising(n, 100, 0.06) for n in (1, 2, 3, 9)] == [4, 8, 19, 19]
    assert [promising(1, 8, p) for p in (0.27, 0.26, 0.17, 0.12)] == [0, 1, 2, 3]


def test_a_step_without_any_match_is_a_plain_step():
    draft = propose(started([[1, 2], [3]], [[5], [6]]))
    assert draft.ids.tolist() == [[5], [6]]
    assert (draft.max_depth, draft.num_nodes) == (0, None)


def test_branches_share_what_they_begin_with():
    #   5 → 6 7, 5 → 6 8, 5 → 9 5 (newest): a tree of three branches, two of which share the 6
    drafter = started([[5, 6, 7, 5, 6, 8, 5, 9, 5]], [[9, 5]], max_drafts=2, num_branches=3, max_ngram=1)
    draft = propose(drafter)
    paths = set()
    for node in range(1, draft.ids.shape[1]):
        path, at = [], node
        while at > 0:
            path.append(int(draft.ids[0, at]))
            at = int(draft.parents[0, at])
        paths.add(tuple(reversed(path)))
    assert paths == {(9,), (9, 5), (6,), (6, 8), (6, 7)}
    assert torch.equal(draft.depths, depths_from_mask(draft.tree_mask))
    assert draft.max_depth == 2
    assert drafter.max_nodes == 7


@pytest.mark.parametrize("num_branches", [1, 3])
def test_texts_are_those_of_plain_decoding_and_loops_are_drafted(table, num_branches):  # noqa: F811
    prompts = [[1, 4, 1], [3, 2], [2, 2, 0, 1]]
    plain = []
    for prompt in prompts:
        text = list(prompt)
        while len(text) < len(prompt) + 40:
            text.append(int(table[text[-2], text[-1]].argmax()))
        plain.append(text[len(prompt) :])
    drafter, stats = NGramDrafter(max_drafts=6, num_branches=num_branches), DecodeStats()
    rows = [[] for _ in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        target = TableTarget(table, 1, 80)
        steps = decode(target, drafter, *pad([prompt]), acceptance=GreedyAcceptance(), max_new_tokens=40, stats=stats)
        row += [token for step in steps for token in step.tokens[0]]
    assert rows == plain
    assert stats.mean_accepted > 2, "a Markov chain of second order repeats itself soon"


def test_lookup_leaves_the_law_alone(table):  # noqa: F811
    drafter = NGramDrafter(max_drafts=3, num_branches=2)
    counts = sample(table, lambda seeds: drafter, RejectionAcceptance(), 1.0, prompt=REPETITIVE)
    assert chi_square_excess(counts, law_of(table, 1.0)) < LIMIT


def test_a_row_does_not_depend_on_its_slot_or_neighbours():
    prompts, seeds = [[3, 1, 3, 1], [5, 5, 5], [2, 8, 2]], torch.tensor([11, 12, 13])

    def run(rows):
        picked = [prompts[row] for row in rows]
        options = {"temperature": 1.5, "seeds": seeds[rows]}
        return decoded(ToyTarget(len(rows), 60, scale=1.0), NGramDrafter(num_branches=2), picked, 20, **options)

    together = run([0, 1, 2])
    assert together[::-1] == run([2, 1, 0])
    assert together == [run([row])[0] for row in range(3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngram": 0}, "max_ngram must be in"),
        ({"min_ngram": 4}, r"min_ngram must be in \[1, 3\], got 4"),
        ({"num_branches": 0}, "num_branches must be in"),
        ({"max_drafts": 600, "num_branches": 2}, r"max_drafts must be in \[1, 511\], got 600"),
        ({"min_prob": 1.0}, r"NGramDrafter: min_prob must be in \[0, 1\), got 1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rejects(options, message):
    with pytest.raises(ValueError, match=message):
        NGramDrafter(**options)


def test_needs_a_run():
    with pytest.raises(RuntimeError, match="works only inside decode"):
        NGramDrafter().propose(torch.tensor([1]))
