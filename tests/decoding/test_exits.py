import pytest
import torch

from specdec_kernels.decoding import ExitRule


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
