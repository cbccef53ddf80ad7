"""Linear layers in Triton against the exact answer, pairwise over their options, and what they move."""

import pytest
import torch

from specdec_kernels.kernels.linear import gated_linear_triton, linear_triton
from specdec_kernels.testing import assert_close_to_baseline
from tests.kernels.meter import Launch, measure
from tests.kernels.pairwise import pairwise
from tests.ops.test_linear import _moved, gated_inputs, gated_law, law, make_inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

GRID = pairwise(
    {
        "dtype": [BF16, FP32, FP16],
        "shape": [(1, 1), (2, 3), (17,), (2, 3, 11), (1, 70)],  # every tile of rows
        "width": [64, 40, 17, 128, 1],
        "counts": [(64, 32, 32), (7,), (33, 1), (3, 2, 1, 97)],
        "bias": [True, False],
        "residual": [True, False],
    }
)


def case_id(options: dict) -> str:
    return "-".join(str(v).removeprefix("torch.").replace(" ", "") for v in options.values())


def case_of(o: dict) -> tuple:
    return (*o["shape"], o["width"]), o["counts"], o["dtype"], o["bias"], o["residual"]


@pytest.mark.parametrize("o", GRID, ids=case_id)
def test_matches_exact(o: dict) -> None:
    inputs = make_inputs(case_of(o))
    out = linear_triton(*inputs)
    assert out.is_contiguous()
    assert_close_to_baseline(out, law(*_moved(inputs, torch.float64)), law(*inputs))
    gated = gated_inputs(case_of(o))
    assert_close_to_baseline(gated_linear_triton(*gated), gated_law(*_moved(gated, torch.float64)), gated_law(*gated))


@pytest.mark.parametrize("rows", [3, 65])
def test_wide_tiles(rows) -> None:
    """So many columns that wide tiles fill the device; the first matrix ends within a tile."""
    inputs = make_inputs(((rows, 16), (16000, 1100), BF16, True, True))
    assert_close_to_baseline(linear_triton(*inputs), law(*_moved(inputs, torch.float64)), law(*inputs))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_rows_do_not_see_each_other(dtype) -> None:
    """One row has the bits that it has among others of its tile, in any place; NaN stays in its row."""
    x, weights, biases, residual = make_inputs(((16, 72), (40, 9), dtype, True, True))
    clean, gated = (
        linear_triton(x, weights, biases, residual),
        gated_linear_triton(x, weights[0], weights[0], None, None),
    )
    for begin, end in ((0, 1), (7, 9), (15, 16)):
        rows = slice(begin, end)
        assert torch.equal(linear_triton(x[rows], weights, biases, residual[rows]), clean[rows])
        assert torch.equal(gated_linear_triton(x[rows], weights[0], weights[0], None, None), gated[rows])
    x[3] = float("nan")
    dirty = linear_triton(x, weights, biases, residual)
    assert torch.equal(dirty[4:], clean[4:])
    assert dirty[3].isnan().all()


def test_same_bits_as_the_reference() -> None:
    """On small integers every product and sum is exact, so every result is the reference's, whatever the tile."""
    weights = [torch.randint(-2, 3, (n, 40)).to(BF16) for n in (50, 3)]
    for rows in (1, 64, 65):
        x, residual = torch.randint(-2, 3, (rows, 40)).to(BF16), torch.randint(-9, 9, (rows, 53)).to(BF16)
        biases = [torch.randint(-3, 3, (n,)).to(BF16) for n in (50, 3)]
        expected = law(x, weights, biases, residual)
        torch.testing.assert_close(linear_triton(x, weights, biases, residual), expected, rtol=0, atol=0)


def test_double_runs_on_the_reference() -> None:
    inputs = make_inputs(((3, 7), (5, 2), torch.float64, True, True))
    torch.testing.assert_close(linear_triton(*inputs), law(*inputs))
    gated = gated_inputs(((3, 7), (5,), torch.float64, True, False))
    torch.testing.assert_close(gated_linear_triton(*gated), gated_law(*gated))


def test_offsets_beyond_31_bits() -> None:
    """A matrix whose third row lies past 2^31 elements; the memory is virtual, only three rows are touched."""
    step = 2**30 + 16
    far = torch.empty(2 * step + 64, dtype=BF16).as_strided((3, 16), (step, 1))
    far.copy_(torch.randn(3, 16))
    x, near = torch.randn(2, 16).to(BF16), far.clone()
    assert torch.equal(linear_triton(x, [far], [], None), linear_triton(x, [near], [], None))
    assert torch.equal(linear_triton(far, [x], [], None), linear_triton(near, [x], [], None))
    assert torch.equal(gated_linear_triton(x, far, far, None, None), gated_linear_triton(x, near, near, None, None))


def test_no_rows_and_no_columns() -> None:
    x, weight = torch.ones(2, 4, dtype=BF16), torch.ones(3, 4, dtype=BF16)
    assert linear_triton(x[:0], [weight, weight], [], None).shape == (0, 6)
    assert linear_triton(x, [weight[:0]], [], None).shape == (2, 0)
    assert linear_triton(x, [weight[:0], weight, weight[:0]], [], None).tolist() == [[4.0] * 3] * 2
    assert gated_linear_triton(x, weight[:0], weight[:0], None, None).shape == (2, 0)


def moved(launch: Launch, weights: tuple[str, ...]) -> int:
    """Weights count as often as they are read; what is read again of x stays in the L2 cache and counts once."""
    traffic = launch.traffic.items()
    return sum(t.stored + (t.loaded if name in weights else min(t.loaded, t.distinct)) for name, t in traffic)


def size(*tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("rows", [1, 16, 64, 128])
def test_reads_weights_once(rows) -> None:
    x, weights, biases, residual = make_inputs(((rows, 256), (384, 128), BF16, True, True))
    with measure() as launches:
        out = linear_triton(x, weights, biases, residual)
    [launch] = launches
    names = ("weights.0", "weights.1")
    assert [launch.traffic[name].loaded for name in names] == [size(w) for w in weights]
    ratio = moved(launch, names) / size(x, *weights, *biases, residual, out)
    print(f"{rows} rows: {ratio:.4f}")
    assert ratio <= 1.02
    with measure() as launches:
        out = gated_linear_triton(x, *(weights[0], weights[0].clone()), *[biases[0]] * 2)
    [launch] = launches
    ratio = moved(launch, ("gate_ptr", "up_ptr")) / size(x, weights[0], weights[0], biases[0], biases[0], out)
    assert ratio <= 1.02


def test_more_rows_read_weights_again() -> None:
    """For each tile of 128 rows; its programs run side by side and meet in the L2 cache."""
    x, weights, *_ = make_inputs(((129, 16), (64,), BF16, False, False))
    with measure() as launches:
        linear_triton(x, weights, [], None)
    assert launches[0].traffic["weights.0"].loaded == 2 * size(*weights)


def test_rows_are_read_once_a_tile() -> None:
    """Of 32 columns where the device is not filled; rows of padding are not read."""
    x, weights, *_ = make_inputs(((3, 64), (96, 33), BF16, False, False))
    with measure() as launches:
        linear_triton(x, weights, [], None)
    assert launches[0].traffic["x_ptr"].loaded == (3 + 2) * size(x)
