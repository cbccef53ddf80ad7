"""A budget that learns: what it remembers, what it tries, and what it loses where drafts are useless."""

import random

import pytest

from specdec_kernels.decoding import DecodeStats
from specdec_kernels.decoding.budget import NodeBudget
from specdec_kernels.decoding.learning_budget import LearningBudget
from tests.decoding.test_loop import BRANCHY, make, run

# A chain of which each further draft is accepted in 7 of 10 cases; each node costs 0.1 of a plain step of one row.
GAINS = [0.7**depth for depth in range(17)]


def step_us(num_nodes, num_rows, context_len):
    return 90 + 10 * num_nodes * num_rows


def learning(gains=GAINS, **options):
    return LearningBudget(NodeBudget(gains, step_us), **options)


class FixedSize:
    def __init__(self, size):
        self.size = size

    def choose(self, num_rows, context_len):
        return self.size

    def observe(self, num_nodes, accepted):
        pass


def decode_text(budget, chances, num_steps, num_rows=1):
    """Simulate steps in which each further draft of a chain is accepted by chance; return tokens, time, and sizes."""
    generator, tokens, time_us, sizes = random.Random(0), 0, 0.0, []
    for step in range(num_steps):
        size = budget.choose(num_rows, 256)
        paths = []
        for _ in range(num_rows):
            length = 0
            while length < size - 1 and generator.random() < chances(step):
                length += 1
            paths.append(list(range(1, length + 1)))
        tokens += num_rows + sum(map(len, paths))
        time_us += step_us(size, num_rows, 256)
        sizes.append(size)
        budget.observe(size, paths)
    return tokens, time_us, sizes


def test_gains_are_averages_of_what_was_accepted():
    budget = learning([1, 0.5, 0.5, 0.5], rate=0.25)
    budget.observe(3, [[1], [1, 2]])
    assert budget.gains == [1, 0.5 * 0.75**2 + 0.25 * (0.75 + 1), 0.5 * 0.75**2 + 0.25, 0.5]
    budget.begin()
    assert budget.gains == [1, 0.5, 0.5, 0.5]


def test_averages_are_the_tokens_per_step_of_smaller_drafts():
    """Of a chain cut to its first t nodes as many drafts are accepted as the whole one accepts, at most t − 1."""
    budget, generator = learning([1.0] + [0.0] * 8, rate=0.1), random.Random(1)
    tokens = [0.0] * 10
    for _ in range(30):
        length = generator.randint(0, 8)
        budget.observe(9, [range(1, length + 1)])
        tokens = [old + 0.1 * (min(length, t - 1) - old) for t, old in enumerate(tokens)]
    for size in range(1, 10):
        assert sum(budget.gains[:size]) == pytest.approx(1 + tokens[size])


def test_before_it_has_seen_anything_it_is_the_calibrated_budget():
    for rows in (1, 2, 5, 30):
        assert learning().choose(rows, 256) == NodeBudget(GAINS, step_us).choose(rows, 256)


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_little_is_lost_where_nothing_is_accepted(num_rows):
    budget = learning()
    decode_text(budget, lambda step: 0.0, 120, num_rows)
    _, time_us, sizes = decode_text(budget, lambda step: 0.0, 1000, num_rows)
    assert 1 < time_us / (1000 * step_us(1, num_rows, 256)) < 1.031
    assert sizes.count(1) > 900


def test_where_not_even_luck_would_pay_nothing_is_tried():
    *_, sizes = decode_text(learning([0.3**depth for depth in range(17)]), lambda step: 0.0, 500, num_rows=64)
    assert set(sizes) == {1}


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_at_most_a_twentieth_is_lost_against_plain_decoding_and_against_the_calibrated_size(chance):
    tokens, time_us, _ = decode_text(learning(), lambda step: chance, 3000)
    for size in (1, NodeBudget(GAINS, step_us).choose(1, 256)):
        fixed_tokens, fixed_time_us, _ = decode_text(FixedSize(size), lambda step: chance, 3000)
        assert tokens / time_us > 0.95 * fixed_tokens / fixed_time_us


def test_it_follows_a_text_that_changes():
    budget = learning()
    *_, before = decode_text(budget, lambda step: 0.0, 300)
    *_, after = decode_text(budget, lambda step: 0.9, 1500)
    assert before.count(1) > 200
    assert min(after[-50:]) >= NodeBudget(GAINS, step_us).choose(1, 256)


def test_it_grows_where_the_calibrated_budget_is_too_careful():
    gains = [0.3**depth for depth in range(17)]
    careful = NodeBudget(gains, step_us).choose(1, 256)
    *_, sizes = decode_text(learning(gains), lambda step: 0.95, 600)
    assert min(sizes[-50:]) > careful


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": 1.0}, {"probe_share": 0.0}, {"probe_share": 1.0}])
def test_rejects(options):
    with pytest.raises(ValueError, match=f"LearningBudget: {next(iter(options))} must be in"):
        learning(**options)


def test_the_loop_tells_what_was_accepted_and_texts_stay_as_they_are():
    target, drafter, plain = make(BRANCHY)
    budget, stats = learning([1.0] + [0.1] * (BRANCHY.num_nodes - 1)), DecodeStats()
    seen = []
    budget.observe = lambda num_nodes, accepted: seen.append((num_nodes, [list(path) for path in accepted]))
    _, rows = run(target, drafter, budget=budget, stats=stats)
    assert rows == [ids[:12] for ids in plain]
    assert len(seen) == stats.num_steps
    assert {num_nodes for num_nodes, _ in seen} == {size for size, n in enumerate(stats.width_histogram) if n}
    counts = [sum(node in path for _, paths in seen for path in paths) for node in range(1, BRANCHY.num_nodes)]
    assert sum(counts) >= sum(stats.node_histogram)


def test_a_run_begins_anew():
    target, drafter, _ = make(BRANCHY)
    budget = learning([1.0] + [0.1] * (BRANCHY.num_nodes - 1))
    budget.observe(BRANCHY.num_nodes, [range(1, BRANCHY.num_nodes)] * 50)
    assert budget.choose(3, 64) == BRANCHY.num_nodes
    steps, _ = run(target, drafter, budget=budget)
    assert steps[1].draft.ids.shape[1] == 1
