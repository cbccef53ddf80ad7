"""The assignment of draws: who gets which number, and that nobody gets another's."""

import pytest
import torch

from specdec_kernels import philox_uniforms
from specdec_kernels.decoding.randomness import draft_uniforms_at, row_seeds, uniforms_at


def test_named_by_seed_and_position():
    seeds, positions = torch.tensor([7, 8]), torch.tensor([3, 100], dtype=torch.int32)
    drawn = uniforms_at(seeds, positions, 5)
    assert torch.equal(drawn, philox_uniforms(seeds, positions.long(), 5))
    assert torch.equal(uniforms_at(seeds, positions, 26)[:, :5], drawn)


@pytest.mark.parametrize("draws", [uniforms_at, draft_uniforms_at])
def test_slot_and_batch_do_not_matter(draws):
    """The same request alone in slot 0 and in slot 3 of 5."""
    alone = draws(torch.tensor([7]), torch.tensor([40]), 9)
    crowd = draws(torch.tensor([1, 2, 3, 7, 5]), torch.tensor([4, 4, 4, 40, 4]), 9)
    assert torch.equal(crowd[3], alone[0])


def test_no_draw_is_used_twice():
    """By verification and drafting together, at many seeds and positions."""
    seeds = row_seeds(1, 16).repeat_interleave(64)
    positions = torch.arange(64).repeat(16)
    drawn = torch.cat([uniforms_at(seeds, positions, 8), draft_uniforms_at(seeds, positions, 8)])
    # Single numbers repeat by chance; rows of 8 do only when a counter is reused.
    assert len(drawn.unique(dim=0)) == len(drawn)


def test_streams_are_independent():
    seeds = row_seeds(3, 2000)
    positions = torch.arange(2000)
    a = uniforms_at(seeds, positions, 4).double().flatten() - 0.5
    b = draft_uniforms_at(seeds, positions, 4).double().flatten() - 0.5
    assert (a * b).mean().abs() < 5 / 12 / len(a) ** 0.5


def test_row_seeds_do_not_depend_on_the_batch():
    assert torch.equal(row_seeds(7, 5)[:2], row_seeds(7, 2))
    assert row_seeds(7, 0).shape == (0,)
    assert row_seeds(7, 1).dtype == torch.int64


def test_row_seeds_differ():
    """Between rows and between neighbouring seeds, also where a naive ``seed + row`` would meet."""
    seeds = torch.cat([row_seeds(seed, 100) for seed in (-1, 0, 1, 2, 2**63)])
    assert len(seeds.unique()) == 500


def test_row_seeds_take_every_64_bit_pattern():
    assert torch.equal(row_seeds(-1, 3), row_seeds(2**64 - 1, 3))
    assert row_seeds(-(2**63), 1).shape == (1,)


@pytest.mark.parametrize(("seed", "num_rows"), [(2**64, 1), (-(2**63) - 1, 1), (0, -1)])
def test_row_seeds_reject(seed, num_rows):
    with pytest.raises(ValueError, match=r"row_seeds: (seed|num_rows) must be in \["):
        row_seeds(seed, num_rows)
