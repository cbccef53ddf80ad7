"""What the kernels move, against what they cannot avoid: every weight once, states in, results out.

Weights count as often as they are read: they are larger than any cache. What the rest of the launches read again (the
states, at most a few hundred KB) stays in the L2 cache and counts once.
"""

from math import ceil

import pytest
import torch

from specdec_kernels.modules import MedusaHeads
from tests.kernels.meter import Launch, measure
from tests.ops.test_medusa_project import make_inputs

from .heads import project_topk

BF16 = torch.bfloat16
WEIGHTS = ("w_ptr", "keys_ptr")


def moved(launch: Launch) -> int:
    traffic = launch.traffic.items()
    return sum(t.stored + (t.loaded if name in WEIGHTS else min(t.loaded, t.distinct)) for name, t in traffic)


def size(*tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@pytest.mark.parametrize(
    ("batch", "projection", "base", "k"),
    [(1, "shared", False, 10), (1, "shared", True, 64), (2, "own", False, 10)],
)
def test_reads_weights_once(batch, projection, base, k) -> None:
    inputs = make_inputs(((batch, 4, 1, 512, 1000), BF16, projection, True))
    with measure() as launches:
        results = project_topk(inputs, k, include_base=base)
    assert [launch.kernel for launch in launches] == ["_residual_kernel", "_project_kernel", "_merge_topk_kernel"]
    residual, project, _ = launches
    assert residual.traffic["w_ptr"].loaded == size(inputs[1])
    assert project.traffic["w_ptr"].loaded == size(inputs[3])
    ratio = sum(map(moved, launches)) / size(*inputs, *results)
    print(f"B{batch} {projection} base={base} k{k}: {ratio:.4f}")
    assert ratio <= 1.02


@pytest.mark.parametrize(("batch", "num_readings"), [(1, 1), (4, 1), (16, 1), (32, 1), (64, 2)])
def test_rows_share_the_weights(batch, num_readings) -> None:
    """Up to 128 rows in one reading; the second, of more rows, runs beside the first and meets it in the L2 cache."""
    inputs = make_inputs(((batch, 4, 0, 16, 130), BF16, "shared", True))
    with measure() as launches:
        project_topk(inputs, 1)
    assert launches[0].traffic["w_ptr"].loaded == num_readings * size(inputs[3])


def test_states_are_read_once_a_tile() -> None:
    """From the L2 cache: for each tile of 128 vocabulary rows; padding rows are not read."""
    inputs = make_inputs(((3, 4, 1, 64, 1000), BF16, "shared", True))
    with measure() as launches:
        project_topk(inputs, 10)
    assert launches[1].traffic["x_ptr"].loaded == ceil(1000 / 128) * 12 * 64 * 2


def test_logits_are_never_written() -> None:
    """A program leaves k keys of 4 bytes and one log-sum-exp for each row."""
    inputs = make_inputs(((2, 4, 1, 64, 1000), BF16, "shared", True))
    with measure() as launches:
        project_topk(inputs, 10)
    num_splits = ceil(1000 / 128)
    assert sum(t.stored for t in launches[1].traffic.values()) == num_splits * 8 * (10 * 4 + 4)
    assert launches[2].traffic["keys_ptr"].loaded == num_splits * 8 * 10 * 4


def test_one_launch_a_layer() -> None:
    inputs = make_inputs(((2, 3, 3, 32, 100), BF16, "own", True))
    with measure() as launches:
        project_topk(inputs, 5)
    assert [launch.kernel for launch in launches].count("_residual_kernel") == 3
    assert len(launches) == 5


def test_the_module_reaches_the_kernels(backend) -> None:
    """`MedusaHeads.topk` with the dispatcher as on a GPU."""
    heads = MedusaHeads(3, 1, 16, 50, dtype=BF16)
    with measure() as launches:
        heads.topk(torch.randn(2, 16).to(BF16), 4, torch.randn(50, 16).to(BF16), num_heads=2)
    assert [launch.kernel for launch in launches] == ["_residual_kernel", "_project_kernel", "_merge_topk_kernel"]


def test_meter_sees_an_access_outside() -> None:
    inputs = make_inputs(((1, 1, 1, 16, 40), BF16, "shared", True))
    with pytest.raises(Exception, match="load outside every tensor"), measure():
        project_topk(inputs, 40, torch.arange(20))  # the map needs 40 rows
