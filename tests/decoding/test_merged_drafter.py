"""One tree of several drafts: no path is lost, none is doubled, and neither texts nor laws change."""

from functools import partial

import pytest
import torch

from specdec_kernels.decoding import DecodeStats, Draft, RejectionAcceptance, decode
from specdec_kernels.decoding.drafters import DraftModelDrafter, MergedDrafter, NGramDrafter, PlainDrafter
from specdec_kernels.decoding.drafters.merged import graft
from specdec_kernels.testing import random_parents
from specdec_kernels.tree import DraftTree
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents

from .test_draft_model_drafter import ALWAYS, PROMPTS, Blurred, WatchedDrafter
from .test_drafting import decoded
from .test_loop_law import LIMIT, FixedDrafter, law_of, sample, table  # noqa: F401 (a fixture)
from .test_ngram_drafter import REPETITIVE
from .toy import CheatingDrafter, TableTarget, ToyTarget, chi_square_excess, draft_of


def draft(ids, parents, num_nodes=None, logits=None):
    """Return a draft of rows with trees of their own."""
    parents = torch.tensor(parents, dtype=torch.int32)
    mask = mask_from_parents(parents)
    depths = depths_from_mask(mask)
    used = None if num_nodes is None else torch.tensor(num_nodes, dtype=torch.int32)
    return Draft(torch.tensor(ids), parents, mask, depths, int(depths.max()), logits, used)


def paths(tree, row):
    """Return the token path of every node in use, by node."""
    parents = tree.parents[row % len(tree.parents)].tolist()
    ids, used = tree.ids[row].tolist(), tree.ids.shape[1] if tree.num_nodes is None else int(tree.num_nodes[row])
    found = [()]
    for node in range(1, used):
        found.append((*found[parents[node]], ids[node]))
    return found


def distinct_siblings(parents, generator):
    """Draw a token for each node; siblings differ, as a drafter's do."""
    ids = [9]
    for node in range(1, len(parents)):
        taken = {ids[other] for other in range(1, node) if parents[other] == parents[node]}
        free = [token for token in range(len(taken) + 2) if token not in taken]
        ids.append(free[int(torch.randint(len(free), (), generator=generator))])
    return ids


def test_the_picture_of_the_docstring():
    a, b, c, d, e = range(1, 6)
    merged = graft(draft([[0, a, e, b]], [[-1, 0, 0, 1]]), draft([[0, a, c, d]], [[-1, 0, 1, 2]]), 8)
    assert merged.ids.tolist() == [[0, a, e, b, c, d]]
    assert merged.parents.tolist() == [[-1, 0, 0, 1, 1, 4]]
    assert merged.depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    assert (merged.max_depth, merged.num_nodes) == (3, None)
    assert torch.equal(merged.tree_mask, mask_from_parents(merged.parents))


@pytest.mark.parametrize("seed", range(12))
def test_merged_trees_hold_the_paths_of_both(seed, monkeypatch):
    """Random ragged trees over few tokens, so that many paths are shared, against sets of paths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 14, (2,), generator=generator).tolist()
    drafts = []
    for size in sizes:
        parents = [random_parents(size, seed=100 * seed + row, max_depth=4) for row in range(3)]
        ids = torch.tensor([distinct_siblings(row, generator) for row in parents])
        used = torch.randint(1, size + 1, (3,), generator=generator).tolist()
        drafts.append(draft(ids.tolist(), parents, used if seed % 2 else None))
    trunk, branch = drafts
    budget = trunk.ids.shape[1] + (40 if seed % 3 else 2)
    merged = graft(trunk, branch, budget)
    for row in range(3):
        before, added, after = paths(trunk, row), paths(branch, row), paths(merged, row)
        assert after[: len(before)] == before, "the trunk keeps its numbers"
        new = after[len(before) :]
        assert len(set(new)) == len(new), "a path is there twice"
        assert not set(new) & set(before)
        assert set(new) <= set(added)
        if len(after) < budget:
            assert set(after) == set(before) | set(added)
        assert max(map(len, after)) <= merged.max_depth
        assert len(after) <= budget
    assert torch.equal(merged.ids[:, 0], trunk.ids[:, 0])
    assert torch.equal(merged.depths, depths_from_mask(merged.tree_mask))
    # Without lists, as on a GPU.
    monkeypatch.setattr("specdec_kernels.decoding.drafters.merged.HOST_NODES", 0)
    other = graft(trunk, branch, budget)
    assert [paths(other, row) for row in range(3)] == [paths(merged, row) for row in range(3)]


def test_a_draft_of_the_root_alone_changes_nothing():
    trunk = draft([[0, 1]], [[-1, 0]])
    assert graft(trunk, draft([[0]], [[-1]]), 8) is trunk


def test_nothing_is_grafted_beside_a_drawn_token():
    logits = torch.randn(1, 3, 9)
    trunk = draft([[0, 1, 2]], [[-1, 0, 1]], [3], logits)
    beside = graft(trunk, draft([[0, 1, 3, 4]], [[-1, 0, 1, 0]]), 8)
    assert paths(beside, 0) == paths(trunk, 0)
    beyond = graft(trunk, draft([[0, 1, 2, 5, 6, 7]], [[-1, 0, 1, 2, 3, 2]]), 8)
    assert paths(beyond, 0) == [(), (1,), (1, 2), (1, 2, 5), (1, 2, 5, 6), (1, 2, 7)]
    assert torch.equal(beyond.logits[:, :2], logits[:, :2])
    assert (beyond.logits[:, 2:4].softmax(-1).amax(-1) == 1).all()


def test_who_must_not_draw():
    drawn = draft([[0, 1]], [[-1, 0]], None, torch.zeros(1, 2, 9))
    with pytest.raises(ValueError, match="only the first drafter may draw"):
        graft(draft([[0, 1]], [[-1, 0]]), drawn, 8)


def test_the_budget():
    with pytest.raises(ValueError, match="at least two drafters"):
        MergedDrafter(NGramDrafter())
    with pytest.raises(ValueError, match=r"max_nodes must be in \[9, 1024\], got 8"):
        MergedDrafter(NGramDrafter(), NGramDrafter(), max_nodes=8)
    assert MergedDrafter(NGramDrafter(), NGramDrafter(), PlainDrafter()).max_nodes == 17
    assert MergedDrafter(NGramDrafter(), NGramDrafter(), max_nodes=12).max_nodes == 12


class Says:
    """Propose always the same draft."""

    def __init__(self, draft, max_nodes):
        self.draft, self.max_nodes = draft, max_nodes

    def propose(self, pending):
        return self.draft


def test_a_row_with_room_is_grafted_into_beside_a_full_one():
    trunk = draft([[0, 1, 2], [5, 6, 0]], [[-1, 0, 1], [-1, 0, 0]], [3, 2])
    branch = Says(draft([[0, 3], [5, 7]], [[-1, 0], [-1, 0]]), 2)
    merged = MergedDrafter(Says(trunk, 3), branch, max_nodes=3).propose(torch.tensor([0, 5]))
    assert [paths(merged, row) for row in range(2)] == [[(), (1,), (1, 2)], [(), (6,), (7,)]]


def test_an_oracle_is_followed_through_the_tree_of_another():
    """The first drafter knows one token ahead, the second three: every step emits four, from one tree."""
    target, stats = ToyTarget(3, 60), DecodeStats()
    plain = [target.plain(prompt, 40) for prompt in PROMPTS]
    near = CheatingDrafter(DraftTree.from_choices([[0], [1]]), plain)
    far = CheatingDrafter(DraftTree.chain(3), plain)
    assert decoded(target, MergedDrafter(near, far, max_nodes=6), PROMPTS, 25, stats=stats) == [p[:25] for p in plain]
    assert stats.accepted_histogram == [0, 0, 0, 18]


def test_a_draft_model_takes_in_what_another_drafter_contributed():
    """Accepted tokens that it has not drafted are fed to it; its cache is checked at every step."""
    target = ToyTarget(3, 80)
    plain = [target.plain(prompt, 40) for prompt in PROMPTS]
    model = WatchedDrafter(partial(Blurred, noise=1.5), max_drafts=2, exit_rule=ALWAYS)
    oracle = CheatingDrafter(DraftTree.chain(5), plain)
    stats = DecodeStats()
    assert decoded(target, MergedDrafter(model, oracle), PROMPTS, 25, stats=stats) == [p[:25] for p in plain]
    assert stats.mean_accepted == 5
    model.exits.rate.fill_(0.5)
    assert decoded(ToyTarget(3, 80), MergedDrafter(oracle, model), PROMPTS, 25) == [p[:25] for p in plain]


def test_a_deterministic_merged_tree_leaves_the_law_alone(table):  # noqa: F811
    drafter = MergedDrafter(FixedDrafter(), NGramDrafter(max_drafts=3))
    counts = sample(table, lambda seeds: drafter, RejectionAcceptance(), 1.0, prompt=REPETITIVE)
    assert chi_square_excess(counts, law_of(table, 1.0)) < LIMIT


def test_a_drawn_trunk_leaves_the_law_alone(table):  # noqa: F811
    other = torch.randn(table.shape, generator=torch.Generator().manual_seed(6))
    model = DraftModelDrafter(partial(TableTarget, other), max_drafts=1, exit_rule=ALWAYS)
    drafter = MergedDrafter(model, NGramDrafter(max_drafts=3))
    counts = sample(table, lambda seeds: drafter, RejectionAcceptance(), 1.0, prompt=REPETITIVE)
    assert chi_square_excess(counts, law_of(table, 1.0)) < LIMIT


@pytest.mark.parametrize("is_merged", [False, True])
def test_only_what_was_drawn_alone_is_a_chain(is_merged, table):  # noqa: F811
    """Merged, whether it is one depends on the drawn tokens, and a rule chosen by them is not exact."""
    model, seen = DraftModelDrafter(partial(TableTarget, table), max_drafts=2, exit_rule=ALWAYS), []
    drafter = MergedDrafter(model, NGramDrafter(max_drafts=3)) if is_merged else model

    def rule(draft, *rest):
        seen.append(draft.is_chain)
        return RejectionAcceptance(block=True)(draft, *rest)

    prompts, lengths = torch.tensor([REPETITIVE] * 4), torch.full((4,), len(REPETITIVE), dtype=torch.int32)
    target = TableTarget(table, 4, len(REPETITIVE) + 8 + drafter.max_nodes)
    assert list(decode(target, drafter, prompts, lengths, acceptance=rule, max_new_tokens=8, temperature=1.0))
    assert set(seen[1:]) == {not is_merged}


def test_the_law_test_sees_a_choice_reported_as_a_draw(table):  # noqa: F811
    """The negative control of the two above: n-grams beside a drawn token, with its distribution for both."""

    class Careless(MergedDrafter):
        def propose(self, pending):
            model, ngram = (drafter.propose(pending) for drafter in self.drafters)
            careless = graft(model._replace(logits=None), ngram, self.max_nodes)
            pad = careless.ids.shape[1] - model.logits.shape[1]
            return careless._replace(logits=torch.nn.functional.pad(model.logits, (0, 0, 0, pad)))

    model = DraftModelDrafter(partial(TableTarget, torch.zeros_like(table)), max_drafts=1, exit_rule=ALWAYS)
    drafter = Careless(model, NGramDrafter(max_drafts=3))
    counts = sample(table, lambda seeds: drafter, RejectionAcceptance(), 1.0, prompt=REPETITIVE)
    assert chi_square_excess(counts, law_of(table, 1.0)) > 2 * LIMIT


def test_static_trees_of_one_row_serve_a_batch():
    tree = DraftTree.from_choices([[0], [1]])
    trunk = draft_of(tree, torch.tensor([[0, 1, 2], [5, 3, 4]]))
    merged = graft(trunk, draft([[0, 2, 3], [5, 6, 7]], [[-1, 0, 1], [-1, 0, 0]]), 9)
    assert paths(merged, 0) == [(), (1,), (2,), (2, 3)]
    assert paths(merged, 1) == [(), (3,), (4,), (6,), (7,)]
