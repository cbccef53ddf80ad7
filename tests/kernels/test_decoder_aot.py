"""The shipped norm and rotation kernels, compiled for GPUs that are not here: no spills, wide loads, few variants."""

import itertools

import pytest
import torch

from specdec_kernels.cli._layer_cases import NormCase, RotationCase
from specdec_kernels.kernels import _aot
from specdec_kernels.kernels import decoder as module

from .aot import compiled

NORM, ROTATION = "_rms_norm_kernel", "_rotary_cache_write_kernel"
LONG, HEADS = NormCase("bf16", 8192), RotationCase("bf16", (128, 128), normed=True, slots=True)
# Row and weight; both halves of q and k, and v. In the others, what is small may arrive in smaller pieces.
FEWEST_WIDE_LOADS = {LONG: 2, HEADS: 5}
# The most numbers in registers, a head in 16 bits, and what differs.
CASES = [
    *itertools.product(["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"], [LONG, HEADS]),
    ("sm_80", NormCase("fp32", 16384)),
    ("sm_90", NormCase("bf16", 128)),
    ("gfx942", NormCase("fp16", 576)),
    ("sm_90", RotationCase("fp32", (128, 64))),
    ("sm_100", RotationCase("bf16", (128, 0))),
]


@pytest.mark.parametrize(("architecture", "case"), CASES, ids=str)
def test_fits(architecture: str, case) -> None:
    kernels = compiled(architecture, case.launch)
    [(name, kernel)] = kernels.items()
    assert name == (NORM if isinstance(case, NormCase) else ROTATION)
    assert not kernel.faults()
    assert kernel.wide_loads() >= FEWEST_WIDE_LOADS.get(case, 1)


def test_gates_see_narrow_loads() -> None:
    """Rows that do not begin at multiples of 16 bytes."""

    def launch() -> None:
        module.rms_norm_triton(torch.empty(16, 513)[:, :512], torch.empty(512), 1e-5)

    assert compiled("sm_90", launch)[NORM].wide_loads() < 2


def test_few_compilations() -> None:
    """Rows, nodes, batch and lengths do not recompile."""
    with _aot.count_variants("sm_90") as found:
        for rows in (1, 2, 7, 16, 64, 1000):
            NormCase("bf16", 576, rows).launch()
            RotationCase("bf16", (64, 64), nodes=rows).launch()
    assert sorted(name for name, _ in found) == [NORM, ROTATION]
