"""The shipped Medusa kernels, compiled for GPUs that are not here: no spills, right size and instructions."""

import itertools
from dataclasses import replace

import pytest
import torch

from specdec_kernels.cli._kernel_cases import DTYPES, HeadsCase
from specdec_kernels.kernels import _aot
from specdec_kernels.kernels import medusa_project as module

from .aot import compiled

NVIDIA = ["sm_80", "sm_90", "sm_100"]
RESIDUAL, PROJECT, MERGE = "_residual_kernel", "_project_kernel", "_merge_topk_kernel"

# Each entry of the launch parameters with the longest list and without one. Then what differs besides.
FULL = [HeadsCase("bf16", rows, 64) for rows in (16, 64, 256)]
CASES = [
    *itertools.product(NVIDIA, FULL + [replace(case, k=0) for case in FULL]),
    *itertools.product(["gfx942"], FULL),
    ("gfx950", FULL[0]),
    ("sm_90", HeadsCase("bf16", 16, 10)),  # the common call
    ("sm_90", HeadsCase("bf16", 16, 1)),
    ("sm_80", HeadsCase("fp16", 16, 10, own=True)),
    ("sm_90", HeadsCase("bf16", 64, 10, hidden=528)),  # the last block of a row is cut
    *itertools.product(NVIDIA, [HeadsCase("fp32", 16, 10), HeadsCase("fp32", 256, 10)]),
    ("gfx942", HeadsCase("fp32", 16, 10)),
]


def block_r(architecture: str, case: HeadsCase) -> int:
    device = _aot.ARCHITECTURES[architecture].device
    return module.choose_plan(device, "project", DTYPES[case.dtype], case.rows).block_r


@pytest.mark.parametrize(("architecture", "case"), CASES, ids=str)
def test_fits(architecture: str, case: HeadsCase) -> None:
    kernels = compiled(architecture, case.launch)
    assert set(kernels) == {RESIDUAL, PROJECT} | ({MERGE} if case.k else set())
    for kernel in kernels.values():
        assert not kernel.faults()
    device = _aot.ARCHITECTURES[architecture].device
    for name, stage, rows in ((PROJECT, "project", case.rows), (RESIDUAL, "residual", case.rows // 4)):
        assert not kernels[name].load_faults()
        plan = module.choose_plan(device, stage, DTYPES[case.dtype], case.rows if case.own else rows)
        assert kernels[name].programs_per_multiprocessor >= plan.target_programs // device.num_multiprocessors
    if case.dtype != "fp32":  # whose products are made without matrix units, exactly
        assert not kernels[PROJECT].matrix_faults(block_r(architecture, case))


@pytest.mark.parametrize("case", FULL, ids=str)
def test_fits_smaller_gpus(case: HeadsCase) -> None:
    """The parameters of sm_80 also serve sm_86 and sm_89, which have 99 KB of shared memory."""
    for kernel in compiled("sm_80", case.launch).values():
        assert kernel.shared_bytes <= 99 * 1024


def options(num_warps: int, num_stages: int, **more) -> dict:
    return {"compile_options": {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True} | more}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [(options(4, 3, maxnreg=64), "stack"), (options(4, 16), "shared memory")],
    ids=["spills", "too-large"],
)
def test_gates_see_a_bad_configuration(change: dict, wrong: str, monkeypatch) -> None:
    choose = module.choose_plan
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **change))
    assert wrong in "; ".join(compiled("sm_90", FULL[0].launch)[PROJECT].faults())


def test_gates_see_narrow_loads() -> None:
    """A row stride that is not a multiple of 16 elements: the loads shrink, and the gate says so."""

    def launch() -> None:
        wide = torch.empty(2048, 512 + 1, dtype=torch.bfloat16)
        hidden, no_layer = wide[:4, :512], torch.empty(1, 0, 512, 512, dtype=torch.bfloat16)
        module.medusa_project_triton(hidden, no_layer, None, wide[:, :512])

    assert compiled("sm_90", launch)[PROJECT].load_faults()


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_few_compilations(own: bool) -> None:
    """The batch does not recompile beyond the tile heights, of which the rows choose one."""
    w_res, dtype = torch.empty(4, 2, 64, 64, dtype=torch.bfloat16), torch.bfloat16
    w_out = torch.empty(*(4,) * own, 1000, 64, dtype=dtype)
    with _aot.count_variants("sm_90") as found:
        for batch in range(1, 65):
            args = (torch.empty(batch, 64, dtype=dtype), w_res, None, w_out)
            module.medusa_project_topk_triton(*args, 10, vocab_map=None)
    names = [name for name, _ in found]
    assert names.count(RESIDUAL) == 2
    assert names.count(PROJECT) == (2 if own else 3)
    assert names.count(MERGE) == 1
