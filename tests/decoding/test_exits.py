import pytest
import torch

from specdec_kernels.decoding import Draft, ExitRule
from specdec_kernels.decoding.exits import count_levels
from specdec_kernels.testing import random_parents
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents
from specdec_kernels.types import Verification


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_the_threshold_follows_the_acceptance():
    """By hand, for a rate below the target, one at it, one above it."""
    exits = ExitRule(threshold=0.6, target_rate=0.8, step=0.1, rate_decay=0.5, threshold_decay=0.75).begin(3, "cpu")
    exits.observe(int32(4, 5, 2), int32(1, 4, 2), torch.ones(3, dtype=torch.bool))
    assert exits.rate.tolist() == pytest.approx([0.525, 0.8, 0.9])
    assert exits.threshold.tolist() == pytest.approx([0.625, 0.625, 0.575])
    exits.observe(int32(4, 5, 2), int32(4, 0, 1), torch.ones(3, dtype=torch.bool))
    assert exits.rate.tolist() == pytest.approx([0.7625, 0.4, 0.7])
    assert exits.threshold.tolist() == pytest.approx([0.65, 0.65, 0.6])


def test_rows_that_ended_or_drafted_nothing_learn_nothing():
    exits = ExitRule(threshold=0.5).begin(3, "cpu")
    exits.observe(int32(0, 3, 3), int32(0, 0, 0), torch.tensor([True, False, True]))
    assert exits.threshold.tolist() == pytest.approx([0.5, 0.5, 0.501])
    assert exits.rate.tolist() == pytest.approx([0.9, 0.9, 0.45])


def test_it_stays_a_probability():
    for start, accepted in ((1.0, 0), (0.0, 3)):
        exits = ExitRule(threshold=start, step=0.5).begin(1, "cpu")
        for _ in range(3):
            exits.observe(int32(3), int32(accepted), torch.ones(1, dtype=torch.bool))
        assert exits.threshold.tolist() == [start]


def test_without_a_target_rate_it_stays():
    exits = ExitRule(threshold=0.4, target_rate=None).begin(2, "cpu")
    exits.observe(int32(3, 3), int32(3, 0), torch.ones(2, dtype=torch.bool))
    assert exits.threshold.tolist() == pytest.approx([0.4, 0.4])


def tree_of(ids, parents, num_nodes=None):
    parents = int32(*parents)
    mask = mask_from_parents(parents)
    return Draft(torch.tensor(ids), parents, mask, depths_from_mask(mask), max(len(ids[0]) - 1, 0), None, num_nodes)


def emitted(*rows):
    """The verification of some larger tree; what it accepted there is not a matter of the draft."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row] + [-1] * (width - len(row)) for row in rows])
    counts = int32(*(len(row) - 1 for row in rows))
    return Verification(ids, counts, torch.full((len(rows), width - 1), -1, dtype=torch.int32))


def counts_of(draft, verification):
    return [counts.tolist() for counts in count_levels(draft, verification)]


def test_a_chain_counts_by_its_tokens_whatever_it_was_merged_into():
    chain = tree_of([[9, 1, 2, 3]] * 5, [[-1, 0, 1, 2]], int32(4, 4, 3, 1, 4))
    verification = emitted([1, 2, 3, 5, 6], [1, 2, 5], [1, 2, 3, 4], [1, 2], [4])
    assert counts_of(chain, verification) == [[3, 3, 2, 0, 3], [3, 2, 2, 0, 0]]


def test_the_final_token_was_not_accepted():
    """It is the draft that found no room in the merged tree."""
    assert counts_of(tree_of([[9, 1, 2]], [[-1, 0, 1]]), emitted([1, 2])) == [[2], [1]]


def test_a_tree_counts_its_deepest_path_and_each_row_its_own_levels():
    tree = tree_of([[9, 1, 2, 3, 4, 5]] * 3, [[-1, 0, 0, 1, 2, 4]], int32(6, 5, 3))
    assert counts_of(tree, emitted([2, 4, 5, 0], [2, 4, 5, 0], [1, 3, 0])) == [[3, 2, 1], [3, 2, 1]]
    # A token of another branch is on no path.
    assert counts_of(tree, emitted([1, 4, 5, 0], [5, 4, 5, 0], [2, 3, 0])) == [[3, 2, 1], [1, 0, 1]]


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_against_sets_of_paths(seed):
    generator = torch.Generator().manual_seed(seed)
    size = 3 + seed * 20
    parents = [random_parents(size, seed=seed * 10 + row, max_depth=5) for row in range(4)]
    ids = torch.randint(2, (4, size), generator=generator)
    used = torch.randint(1, size + 1, (4,), generator=generator, dtype=torch.int32)
    texts = [torch.randint(2, (count,), generator=generator).tolist() for count in (1, 4, 6, 8)]
    drafted, accepted = count_levels(tree_of(ids.tolist(), parents, used), emitted(*texts))
    for row, text in enumerate(texts):
        paths = [()]
        for node in range(1, int(used[row])):
            paths.append((*paths[parents[row][node]], int(ids[row, node])))
        assert drafted[row] == max(map(len, paths))
        assert accepted[row] == max(len(path) for path in paths if path == tuple(text[:-1][: len(path)]))


def test_a_proposal_is_settled_once():
    """A step in which the drafter was not asked teaches it nothing."""
    exits = ExitRule(threshold=0.5).begin(1, "cpu")
    chain = tree_of([[9, 1, 2]], [[-1, 0, 1]])
    assert exits.watch(chain) is chain
    exits.settle(emitted([3]), torch.tensor([True]))
    moved = exits.threshold.tolist()
    assert moved == pytest.approx([0.501])
    exits.settle(emitted([3]), torch.tensor([True]))
    assert exits.threshold.tolist() == moved
