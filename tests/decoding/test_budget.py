"""Costs between measured points, the size a budget chooses, and runs under budgets."""

import itertools
import math
import random

import pytest
import torch

from specdec_kernels.decoding import DecodeStats
from specdec_kernels.decoding.budget import CostPoint, CostTable, FixedBudget, NodeBudget
from specdec_kernels.decoding.drafting import first_nodes
from specdec_kernels.tree import DraftTree, grow_tree
from tests.decoding.test_loop import BRANCHY, PROMPTS, make, run
from tests.decoding.toy import draft_of


def linear(num_nodes, batch_size, context_len):
    return 50.0 + 3 * num_nodes + 7 * batch_size + 0.5 * context_len


class ByRows:
    """A budget that shrinks as the batch grows, and keeps what it was asked."""

    def __init__(self, sizes):
        self.sizes, self.asked = sizes, []

    def choose(self, num_rows, context_len):
        self.asked.append((num_rows, context_len))
        return self.sizes[num_rows]


def test_a_table_draws_lines_between_points_and_beyond_them():
    sizes = itertools.product((1, 4), (256, 1024), (1, 8, 32))
    table = CostTable(CostPoint(b, c, t, linear(t, b, c)) for b, c, t in sizes)
    for nodes, batch, context in [(1, 1, 256), (5, 1, 256), (20, 3, 600), (64, 9, 4000), (32, 4, 1024)]:
        assert table.time_us(nodes, batch, context) == pytest.approx(linear(nodes, batch, context))
    assert table.time_us(1, 1, 10) == linear(1, 1, 256)


def test_lines_never_fall_beyond_the_last_point_and_a_lone_point_is_all_there_is():
    table = CostTable([CostPoint(1, 256, 1, 10.0), CostPoint(1, 256, 2, 8.0)])
    assert table.time_us(2, 1, 256) == table.time_us(99, 5, 9999) == 8.0
    assert table.points == [(1, 256, 1, 10.0), (1, 256, 2, 8.0)]


def test_rows_of_a_table_may_have_sizes_of_their_own():
    table = CostTable([(1, 100, 1, 10), (1, 100, 5, 30), (3, 200, 1, 50), (3, 200, 2, 90)])
    # B = 1: 10 + 5 · 2 = 20 at 3 nodes; B = 3: the line through 50 and 90 gives 130.
    assert table.time_us(3, 2, 200) == pytest.approx((20 + 130) / 2)


@pytest.mark.parametrize("points", [[], [(1, 1, 1, 0.0)], [(1, 1, 1, math.nan)], [(1, 1, 1, math.inf)]])
def test_a_table_rejects(points):
    with pytest.raises(ValueError, match="CostTable"):
        CostTable(points)


@pytest.mark.parametrize("seed", range(6))
def test_the_chosen_size_is_the_best_one(seed):
    generator = random.Random(seed)
    gains = [1.0] + [generator.random() ** 4 for _ in range(19)]
    budget = NodeBudget(gains, lambda t, b, c: 100 + (2 + seed) * t * b, sizes=range(1, 21))
    for rows in (1, 2, 5, 30):
        speeds = [rows * sum(gains[:t]) / (100 + (2 + seed) * t * rows) for t in range(1, 21)]
        assert budget.choose(rows, 64) == speeds.index(max(speeds)) + 1
        assert budget.tokens_per_s(7, rows, 64) == pytest.approx(speeds[6] * 1e6)


def test_trees_shrink_to_plain_decoding_as_the_batch_grows():
    _, gains = grow_tree([[0.6, 0.15, 0.1, 0.05], [0.5, 0.1], [0.4, 0.1]], 24)
    budget = NodeBudget(gains, lambda t, b, c: max(1000.0, 20.0 * t * b))
    chosen = [budget.choose(rows, 0) for rows in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > 8
    assert chosen[-1] == 1


def test_steps_by_the_widths_that_drafts_have():
    """With one row a draft is as wide as it is; of several, as wide as the widest."""
    budget = NodeBudget([1, 0.5, 0.5, 0.5], lambda t, b, c: float(t), widths=[0, 3, 0, 0, 1])
    assert budget.step_us(4, 1, 0) == pytest.approx(0.75 * 1 + 0.25 * 4)
    assert budget.step_us(2, 1, 0) == pytest.approx(0.75 * 1 + 0.25 * 2)
    assert budget.step_us(4, 3, 0) == pytest.approx(0.75**3 * 1 + (1 - 0.75**3) * 4)


@pytest.mark.parametrize(("gains", "sizes"), [([], [1]), ([0.9], [1]), ([1, 1.1], [1]), ([1, -0.1], [1]), ([1], [0])])
def test_a_budget_rejects(gains, sizes):
    with pytest.raises(ValueError, match="NodeBudget"):
        NodeBudget(gains, linear, sizes=sizes)
    with pytest.raises(ValueError, match="FixedBudget: max_nodes must be >= 1, got 0"):
        FixedBudget(0)


@pytest.mark.parametrize("size", range(1, BRANCHY.num_nodes + 2))
def test_a_draft_cut_to_its_first_nodes_is_the_draft_of_the_smaller_tree(size):
    ids = torch.arange(2 * BRANCHY.num_nodes).view(2, -1)
    logits = torch.randn(2, BRANCHY.num_nodes, 5)
    cut = first_nodes(draft_of(BRANCHY, ids, logits)._replace(num_nodes=torch.tensor([3, 8])), size)
    small = draft_of(BRANCHY.prefix(size), ids[:, :size], logits[:, :size])
    for name in ("ids", "parents", "tree_mask", "depths", "logits"):
        assert torch.equal(getattr(cut, name), getattr(small, name))
    assert cut.max_depth >= small.max_depth
    assert cut.num_nodes.tolist() == [min(3, size), min(8, size)]


@pytest.mark.parametrize("tree", [DraftTree.chain(3), BRANCHY], ids=["chain", "tree"])
@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_texts_do_not_depend_on_the_budget(tree, size):
    target, drafter, plain = make(tree)
    stats = DecodeStats()
    _, rows = run(target, drafter, budget=FixedBudget(size), stats=stats)
    assert rows == [ids[:12] for ids in plain]
    widest = min(size, tree.num_nodes)
    assert stats.width_histogram == [0] * widest + [stats.num_steps]


def test_the_budget_sees_the_rows_that_go_on_and_the_longest_of_them():
    target, drafter, plain = make()
    budget, left = ByRows({3: 1, 2: 2, 1: 8}), []
    target.run_only = left.append
    limits = [5, 12, 2]
    steps, rows = run(target, drafter, max_new_tokens=limits, budget=budget)
    assert rows == [ids[:limit] for ids, limit in zip(plain, limits, strict=True)]
    assert [step.draft.ids.shape[1] for step in steps[1:]] == [budget.sizes[asked] for asked, _ in budget.asked]
    assert {asked for asked, _ in budget.asked} == {3, 2, 1}
    lengths = [[len(prompt) for prompt in PROMPTS]]
    for step in steps:
        lengths.append([n + len(tokens) for n, tokens in zip(lengths[-1], step.tokens, strict=True)])
    for (_, longest), before, step in zip(budget.asked, lengths[1:], steps, strict=False):
        assert longest == max(n for n, done in zip(before, step.finished, strict=True) if not done)
    assert left == [[0, 1], [1]]


def test_accepted_nodes_are_counted():
    target, drafter, _ = make(BRANCHY, max_new_tokens=1 + 4 * 3)
    stats = DecodeStats()
    run(target, drafter, max_new_tokens=1 + 4 * 3, stats=stats)
    path = [node for node in BRANCHY.path(BRANCHY.leaves[-1]) if node]
    assert [node for node, count in enumerate(stats.node_histogram) if count] == path
    assert [gain > 0 for gain in stats.node_gains] == [node in (0, *path) for node in range(BRANCHY.num_nodes)]
    assert sum(stats.node_gains) == pytest.approx(stats.tokens_per_step)
    assert DecodeStats().node_gains == [1.0]
