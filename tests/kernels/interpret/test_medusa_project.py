"""The Triton kernels against the exact answer, pairwise over their options, on the interpreter."""

import math

import pytest
import torch

from specdec_kernels.kernels.medusa_project import medusa_project_topk_triton, medusa_project_triton
from specdec_kernels.reference.medusa_project import medusa_project_ref, medusa_project_topk_ref
from specdec_kernels.testing import assert_close_to_baseline
from tests.kernels.pairwise import pairwise
from tests.ops.test_medusa_project import doubled, make_inputs, make_root, with_root
from tests.ops.test_medusa_project_topk import sorted_ids

from .heads import force_plan, law, project_topk, topk_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

GRID = pairwise(
    {
        "dtype": [BF16, FP32, FP16],
        "projection": ["shared", "own", "base"],
        "batch": [3, 1, 17],
        "heads": [4, 1],
        "layers": [1, 0, 2],
        "hidden": [64, 40, 17],
        "vocab": [131, 260, 128, 70],
        "k": [10, 1, 64],
        "bias": [True, False],
        "mapped": [False, True],
        "long": [False, True],  # a program walks several tiles
    }
)


def case_id(options: dict) -> str:
    return "-".join(str(v).removeprefix("torch.") for v in options.values())


@pytest.mark.parametrize("o", GRID, ids=case_id)
def test_matches_exact(o: dict, monkeypatch) -> None:
    size = (o["batch"], o["heads"], o["layers"], o["hidden"], o["vocab"])
    inputs = make_inputs((size, o["dtype"], "own" if o["projection"] == "own" else "shared", o["bias"]))
    base, k = o["projection"] == "base", o["k"]
    if o["long"]:
        force_plan(monkeypatch, target_programs=1)
    exact, baseline = law(doubled(inputs), base), law(inputs, base)
    assert_close_to_baseline(medusa_project_triton(*inputs, include_base=base), exact, baseline)

    names = torch.randperm(2 * o["vocab"])[: o["vocab"]] if o["mapped"] else None
    values, ids, lse = project_topk(inputs, k, names, base)
    rows = ids if names is None else (names == ids[..., None]).int().argmax(-1)
    assert (values.diff(dim=-1) <= 0).all()
    assert (rows.sort(-1).values.diff(dim=-1) > 0).all()
    assert names is None or torch.equal(names[rows], ids)
    assert_close_to_baseline(values.to(o["dtype"]), exact.gather(-1, rows), baseline.gather(-1, rows))
    assert_close_to_baseline(values.to(o["dtype"]), exact.topk(k).values, baseline.topk(k).values)
    assert_close_to_baseline(lse, exact.logsumexp(-1), baseline.float().logsumexp(-1))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("k", [1, 10, 64])
def test_ties_across_tiles_and_splits(k, dtype, monkeypatch) -> None:
    """Few distinct values: every rank is decided by the row, in a tile, between tiles, and between splits."""
    force_plan(monkeypatch, block_n=64, target_programs=3)
    logits = torch.randint(-2, 3, (333,)).to(dtype)
    values, ids, lse = topk_of(logits, k)
    expected = sorted_ids(logits.tolist())[:k]
    assert ids.tolist() == expected
    assert values.tolist() == logits[expected].tolist()
    torch.testing.assert_close(lse, logits.float().logsumexp(-1))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("num_numbers", [0, 3, 69], ids=lambda n: f"{n}-numbers")
def test_nan_comes_last(num_numbers, dtype, monkeypatch) -> None:
    """NaN of either sign after −∞, by row, also where a split has fewer rows than k."""
    force_plan(monkeypatch, block_n=64, target_programs=2)
    logits = torch.full((70,), math.nan, dtype=dtype)  # splits of 64 and 6 rows
    logits[::2] = -logits[::2]
    logits[70 - num_numbers :] = torch.randn(num_numbers).to(dtype)
    logits[-1:] = -math.inf
    values, ids, lse = topk_of(logits, 64)
    expected = sorted_ids(logits.tolist())[:64]
    assert ids.tolist() == expected
    torch.testing.assert_close(values, logits[expected].float(), rtol=0, atol=0, equal_nan=True)
    assert lse.isnan() or not logits.isnan().any()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_order_over_all_magnitudes(dtype) -> None:
    """From the smallest subnormal to infinity, both signs, both zeros."""
    info = torch.finfo(dtype)
    magnitudes = torch.tensor(
        [0.0, info.smallest_normal * info.eps, info.smallest_normal, 1e-3, 1.0, info.max, math.inf]
    )
    logits = torch.cat([magnitudes, -magnitudes])[torch.randperm(14)].to(dtype)
    values, ids, _ = topk_of(logits, 14)
    assert ids.tolist() == sorted_ids(logits.tolist())
    assert torch.equal(values, logits[ids].float())


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([-math.inf] * 3, -math.inf), ([math.inf, 0.0, 1.0], math.inf), ([3e38, 0.0, -3e38], 3e38), ([-1e4] * 3, -1e4)],
)
def test_lse_of_extremes(logits, expected, monkeypatch) -> None:
    """The extreme in one split, numbers or nothing in the other."""
    force_plan(monkeypatch, block_n=16, target_programs=2)
    for padding in (-math.inf, min(logits)):
        values = torch.tensor(logits + [padding] * 20)
        _, _, lse = topk_of(values, 3)
        torch.testing.assert_close(lse, values.logsumexp(-1))
        assert math.isinf(expected) == lse.isinf()


def test_same_bits_as_the_reference() -> None:
    """On small integers every product and sum is exact, so every result is the reference's."""
    inputs = [torch.randint(-1, 2, shape).to(BF16) for shape in ((5, 32), (3, 1, 32, 32), (3, 1, 32), (200, 32))]
    inputs[1].zero_()  # silu of the bias only
    for base in (False, True):
        logits = medusa_project_triton(*inputs, include_base=base)
        close = torch.testing.assert_close
        close(logits, medusa_project_ref(*inputs, include_base=base), rtol=0, atol=0)
        values, ids, lse = project_topk(inputs, 20, torch.arange(200) * 3, base)
        expected = medusa_project_topk_ref(*inputs, 20, vocab_map=torch.arange(200) * 3, include_base=base)
        close((values, ids), expected[:2], rtol=0, atol=0)
        close(lse, expected[2])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("base", [False, True], ids=["heads", "base"])
def test_root_comes_before_the_heads(base, dtype) -> None:
    case = (3, 2, 1, 40, 70), dtype, "shared", True
    inputs, root = make_inputs(case), make_root(case)
    root["root"][0] *= 1e-3  # where the epsilon counts
    exact, seen = doubled(inputs), with_root(inputs[0], *root.values())
    exact_seen = with_root(exact[0], *doubled(root.values()))

    def heads_of(hidden, seen, *weights):
        return torch.cat([law((hidden, *weights), base)[:, :base], law((seen, *weights), False)], dim=1)

    exact, baseline = heads_of(exact[0], exact_seen, *exact[1:]), heads_of(inputs[0], seen, *inputs[1:])
    assert_close_to_baseline(medusa_project_triton(*inputs, include_base=base, **root), exact, baseline)
    values, ids, _ = medusa_project_topk_triton(*inputs, 5, vocab_map=None, include_base=base, **root)
    assert_close_to_baseline(values.to(dtype), exact.gather(-1, ids), baseline.gather(-1, ids))


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("projection", ["shared", "own"])
def test_large_batches(batch, projection) -> None:
    """Every tile height, and several tiles of rows."""
    inputs = make_inputs(((batch, 4, 1, 32, 200), BF16, projection, True))
    values, ids, lse = project_topk(inputs, 1)
    exact, baseline = law(doubled(inputs), False), law(inputs, False)
    assert_close_to_baseline(values.to(BF16), exact.gather(-1, ids), baseline.gather(-1, ids))
    assert_close_to_baseline(lse, exact.logsumexp(-1), baseline.float().logsumexp(-1))


def test_rows_do_not_see_each_other() -> None:
    """A NaN state leaves other rows' bits alone, and so does the place in the batch."""
    hidden, *weights = make_inputs(((4, 2, 1, 32, 150), BF16, "shared", True))
    clean = project_topk((hidden, *weights), 6)
    dirty = hidden.clone()
    dirty[1] = math.nan
    for before, after in zip(clean, project_topk((dirty, *weights), 6), strict=True):
        assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    for before, after in zip(clean, project_topk((hidden.flip(0), *weights), 6), strict=True):
        assert torch.equal(after.flip(0), before)


def test_empty_batch() -> None:
    inputs = make_inputs(((0, 3, 1, 16, 20), BF16, "own", True))
    assert medusa_project_triton(*inputs).shape == (0, 3, 20)
    assert [t.shape for t in project_topk(inputs, 4)] == [(0, 3, 4), (0, 3, 4), (0, 3)]


def test_double_runs_on_the_reference() -> None:
    inputs = make_inputs(((2, 2, 1, 16, 33), torch.float64, "own", True))
    torch.testing.assert_close(medusa_project_triton(*inputs), law(inputs, False))
    assert project_topk(inputs, 3)[0].dtype == FP32


def test_offsets_beyond_31_bits() -> None:
    """A projection whose third row lies past 2^31 elements; the memory is virtual, only three rows are touched."""
    step = 2**30 + 16
    w_out = torch.empty(2 * step + 64, dtype=BF16).as_strided((3, 16), (step, 1))
    w_out.copy_(torch.randn(3, 16))
    hidden, no_layer = torch.randn(1, 16).to(BF16), torch.empty(1, 0, 16, 16, dtype=BF16)
    far, near = ((hidden, no_layer, None, w) for w in (w_out, w_out.clone()))
    torch.testing.assert_close(project_topk(far, 3), project_topk(near, 3), rtol=0, atol=0)
