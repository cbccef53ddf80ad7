"""The optimiser against brute force: every tree of the budget, and every outcome of the heads."""

import itertools
import math
import random

import pytest
import torch

from specdec_kernels import DraftTree
from specdec_kernels.tree import expected_tokens, fastest_tree, grow_tree, node_gains, optimize_tree


def random_accuracies(num_ranks, seed: int, steps: int | None = None) -> list[list[float]]:
    """Draw probabilities in no particular order; with ``steps`` they are coarse, so many nodes tie."""
    generator = random.Random(seed)
    heads = []
    for count in num_ranks:
        weights = [generator.random() if steps is None else generator.randint(0, steps) for _ in range(count)]
        scale = generator.uniform(0.5, 1.0) if steps is None else 1.0
        heads.append([weight * scale / (sum(weights) or 1) for weight in weights])
    return heads


def tokens_by_outcomes(paths, accuracies) -> float:
    """Sum over every outcome of the heads: which rank of each is right (or none), and how deep the tree follows it."""
    total = 0.0
    outcomes = [[*enumerate(row), (None, 1 - math.fsum(row))] for row in accuracies]
    for outcome in itertools.product(*outcomes):
        right = tuple(rank for rank, _ in outcome)
        length = 0
        while length < len(right) and right[: length + 1] in paths:
            length += 1
        total += math.prod(probability for _, probability in outcome) * (1 + length)
    return total


def all_trees(num_ranks, max_children: int | None):
    """Yield every tree with these heads as a set of paths."""
    nodes = [
        path for depth in range(1, len(num_ranks) + 1) for path in itertools.product(*map(range, num_ranks[:depth]))
    ]

    def grow(i: int, chosen: frozenset):
        if i == len(nodes):
            yield chosen
            return
        yield from grow(i + 1, chosen)
        parent = nodes[i][:-1]
        siblings = sum(path[:-1] == parent for path in chosen)
        if (not parent or parent in chosen) and (max_children is None or siblings < max_children):
            yield from grow(i + 1, chosen | {nodes[i]})

    yield from grow(0, frozenset())


@pytest.mark.parametrize("max_children", [None, 1, 2])
@pytest.mark.parametrize("num_ranks", [(3, 3), (2, 2, 2), (1, 4), (2, 1, 2)], ids=str)
def test_no_tree_is_better(num_ranks, max_children):
    for seed in range(4):
        accuracies = random_accuracies(num_ranks, seed, steps=None if seed < 3 else 3)
        best: dict[int, float] = {}
        for paths in all_trees(num_ranks, max_children):
            size = len(paths) + 1
            best[size] = max(best.get(size, 0), tokens_by_outcomes(paths, accuracies))
        reached = 0.0
        for size in range(1, max(best) + 1):
            reached = max(reached, best[size])
            tree, tokens = optimize_tree(accuracies, size, max_children=max_children)
            assert tree.num_nodes <= size
            assert tokens == pytest.approx(reached, abs=1e-12)
            assert tokens == pytest.approx(
                tokens_by_outcomes(set(map(tuple, tree.to_choices())), accuracies), abs=1e-12
            )
            assert tokens == pytest.approx(expected_tokens(tree, accuracies), abs=1e-12)
            assert max_children is None or max(map(len, tree.children)) <= max_children


def test_a_tree_by_hand():
    tree, tokens = optimize_tree([[0.6, 0.2], [0.5, 0.1]], 4)
    assert tree.to_choices() == [[0], [1], [0, 0]]
    assert tokens == pytest.approx(1 + 0.6 + 0.2 + 0.3)


def test_ranks_need_not_be_in_order():
    tree, tokens = optimize_tree(torch.tensor([[0.1, 0.0, 0.5], [0.25, 0.5, 0.125]]), 5)
    assert tree.to_choices() == [[0], [2], [2, 0], [2, 1]]
    assert tokens == pytest.approx(1 + 0.5 + 0.1 + 0.25 + 0.125)


def test_more_than_ten_ranks():
    accuracies = [[0.0] * 11 + [0.9], [0.0] * 15 + [0.8]]
    assert optimize_tree(accuracies, 3)[0].to_choices() == [[11], [11, 15]]


def test_ties_go_to_the_shallower_then_to_the_lower_path():
    accuracies = [[0.5, 0.5], [1.0], [1.0]]
    order = [[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]]
    for size in range(1, 8):
        tree, _ = optimize_tree(accuracies, size)
        assert sorted(tree.to_choices()) == sorted(order[: size - 1])


def test_worthless_nodes_are_left_out():
    assert optimize_tree([[0.5, 0.0], [0.0]], 64)[0].to_choices() == [[0]]
    assert optimize_tree([[0.0]], 5) == (DraftTree.chain(0), 1.0)


def test_perfect_heads_give_a_chain_and_every_token():
    tree, tokens = optimize_tree([[1.0, 0.0]] * 4, 64)
    assert (tree, tokens) == (DraftTree.chain(4), 5.0)


def test_a_smaller_budget_is_part_of_a_larger_one():
    accuracies = random_accuracies((10, 10, 10, 10), seed=0)
    smaller: set = set()
    for size in (1, 2, 16, 63, 64, 65, 1024):
        tree, _ = optimize_tree(accuracies, size)
        paths = set(map(tuple, tree.to_choices()))
        assert tree.num_nodes == size
        assert smaller <= paths
        smaller = paths


def test_the_first_nodes_of_a_grown_tree_are_the_best_tree_of_their_number():
    accuracies = random_accuracies((6, 5, 4), seed=2)
    tree, gains = grow_tree(accuracies, 64)
    assert gains == sorted(gains, reverse=True)
    assert node_gains(tree, accuracies) == pytest.approx(gains)
    for size in range(1, 65):
        best, tokens = optimize_tree(accuracies, size)
        assert sorted(tree.prefix(size).to_choices()) == sorted(best.to_choices())
        assert math.fsum(gains[:size]) == pytest.approx(tokens)


@pytest.mark.parametrize("slope", [0.0, 0.3, 1.0, 50.0])
def test_no_size_is_faster(slope):
    """Of every tree there is, under a time with a step in it."""
    accuracies = random_accuracies((2, 2, 2), seed=5)

    def step_us(num_nodes):
        return 10 + slope * num_nodes + 2 * (num_nodes > 4)

    best, sizes = fastest_tree(accuracies, step_us, 15)
    speeds = [tokens_by_outcomes(paths, accuracies) / step_us(len(paths) + 1) for paths in all_trees((2, 2, 2), None)]
    assert best.tokens_per_s == pytest.approx(max(speeds) * 1e6)
    assert best.tokens_per_step == pytest.approx(expected_tokens(best.tree, accuracies))
    assert [sized.tree.num_nodes for sized in sizes] == list(range(1, 16))
    assert (best.tree.num_nodes == 1) == (slope == 50.0)
    assert (best.tree.num_nodes == 15) == (slope == 0.0)


def test_a_time_must_be_positive():
    with pytest.raises(ValueError, match=r"step_us\(2\) must be positive, got 0"):
        fastest_tree([[0.5]], lambda nodes: 2 - nodes, 4)


@pytest.mark.parametrize(
    ("accuracies", "options", "message"),
    [
        ([[0.5]], {"num_nodes": 0}, "num_nodes must be >= 1, got 0"),
        ([[0.5]], {"max_children": 0}, "max_children must be >= 1 or None, got 0"),
        ([], {}, "at least one head"),
        ([[0.5], []], {}, r"accuracies\[1\] must have at least one rank"),
        ([[0.5], [0.1, -0.1]], {}, r"accuracies\[1\]\[1\] must be in \[0, 1\], got -0.1"),
        ([[1.5]], {}, r"accuracies\[0\]\[0\] must be in \[0, 1\], got 1.5"),
        ([[float("nan")]], {}, r"must be in \[0, 1\], got nan"),
        ([[0.5, 0.7]], {}, r"accuracies\[0\] must add up to at most 1, got 1.2.*not cumulative"),
    ],
)
def test_rejects(accuracies, options, message):
    with pytest.raises(ValueError, match=f"optimize_tree: .*{message}"):
        optimize_tree(accuracies, **{"num_nodes": 4, **options})


@pytest.mark.parametrize("accuracies", [[0.5, 0.2], 3, [["0.5"]], [[None]]])
def test_rejects_what_is_not_a_table(accuracies):
    with pytest.raises(TypeError, match=r"numbers \[heads\]\[ranks\]"):
        optimize_tree(accuracies, 4)


def test_sums_may_miss_one_by_rounding():
    assert optimize_tree([[0.1] * 10], 11)[1] == pytest.approx(2.0)
    assert optimize_tree(torch.full((1, 3), 1 / 3, dtype=torch.float32), 4)[1] == pytest.approx(2.0)


def test_expected_tokens_rejects_a_tree_the_heads_cannot_fill():
    with pytest.raises(ValueError, match="3 deep, but there are 2 heads"):
        expected_tokens(DraftTree.chain(3), [[0.5], [0.5]])
    with pytest.raises(ValueError, match=r"node 2 has rank 1, but accuracies\[0\] has 1 ranks"):
        expected_tokens(DraftTree.from_choices([[0], [1]]), [[0.5]])
    with pytest.raises(ValueError, match=r"expected_tokens: accuracies\[0\] must add up"):
        expected_tokens(DraftTree.chain(1), [[0.9, 0.9]])
