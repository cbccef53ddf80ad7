"""The projection of `benchmarks.e2e.projection`: its counts, its regions, and the tables in ``docs/performance.md``."""

from pathlib import Path

import pytest

from benchmarks.cases import MODELS
from benchmarks.e2e import projection
from benchmarks.e2e.projection import H200, HEADS, accuracies_of, best_size, budget_of, last_batch, speed_up, step_us

LLAMA = MODELS["llama3_8b"]
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"


def test_weights_and_cache_are_those_of_the_models():
    """Llama-3-8B has 8.03 billion parameters, of which the embedding is only looked up; its cache 128 KiB a token."""
    embedding_and_norms = 128256 * 4096 + (2 * 32 + 1) * 4096
    assert projection.num_weights(LLAMA) + embedding_and_norms == 8_030_261_248
    assert projection.cache_bytes(LLAMA) == 128 * 1024
    rank = MODELS["llama3_70b_tp8"]
    layers = projection.num_weights(rank) - 128256 * 8192
    assert 8 * layers + (2 * 80 + 1) * 8192 + 2 * 128256 * 8192 == 70_553_706_496


def test_a_step_is_bound_by_bytes_then_by_operations():
    reading = step_us(LLAMA, H200, 1, 1, 1)
    assert reading == pytest.approx(projection.num_weights(LLAMA) * 2 / (4.8e12 * 0.8) * 1e6, rel=1e-3)
    assert step_us(LLAMA, H200, 1, 64, 1) == pytest.approx(reading, rel=1e-2)
    computing = step_us(LLAMA, H200, 1, 2048, 1)
    assert computing == pytest.approx(2 * projection.num_weights(LLAMA) * 2048 / (989e12 * 0.6) * 1e6, rel=0.05)
    drafting = step_us(LLAMA, H200, 2, 1, 1) - reading
    assert drafting == pytest.approx((128256 * 4096 + 4 * 4096**2) * 2 / (4.8e12 * 0.8) * 1e6, rel=1e-2)


def test_speculation_pays_less_and_less():
    budget = budget_of(LLAMA, H200, accuracies_of(HEADS["modest heads"]))
    sizes = [best_size(budget, batch, 1024) for batch in (1, 4, 16, 64, 256)]
    gains = [speed_up(budget, batch, 1024) for batch in (1, 4, 16, 64, 256)]
    assert (sizes, gains) == (sorted(sizes, reverse=True), sorted(gains, reverse=True))
    end = last_batch(lambda batch: speed_up(budget, batch, 1024) > 1)
    assert speed_up(budget, end, 1024) > 1 == speed_up(budget, end + 1, 1024)
    assert last_batch(lambda batch: True) is None
    assert last_batch(lambda batch: False) == 0


@pytest.mark.parametrize("best", HEADS.values())
def test_accuracies_add_up_to_less_than_one(best):
    assert all(sum(row) < 1 and row == sorted(row, reverse=True) for row in accuracies_of(best))


def test_the_document_has_the_tables():
    report = projection.report({name: accuracies_of(best) for name, best in HEADS.items()})
    assert report in DOCUMENT.read_text(encoding="utf-8")
