"""The shipped linear kernels, compiled for GPUs that are not here: no spills, right size and instructions."""

import re
from dataclasses import replace

import pytest
import torch

from specdec_kernels.cli._kernel_cases import DTYPES
from specdec_kernels.cli._layer_cases import LinearCase
from specdec_kernels.kernels import _aot
from specdec_kernels.kernels import linear as module

from .aot import compiled

FEW, MANY = LinearCase("bf16", 64, 2048), LinearCase("bf16", 128, 2048)
FEW_WIDE, MANY_WIDE = replace(FEW, columns=65536), replace(MANY, columns=65536)
GATED, MANY_GATED = replace(FEW, gated=True), replace(MANY, gated=True)
SMALL, TALL = LinearCase("fp32", 16, 2048), LinearCase("fp32", 64, 2048)
# Each entry of the launch parameters on NVIDIA, the taller half on AMD. Then what differs besides.
CASES = [
    *(
        (architecture, case)
        for architecture in ("sm_80", "sm_90", "sm_100")
        for case in (FEW, GATED, FEW_WIDE, MANY_WIDE)
    ),
    *(("sm_90", case) for case in (MANY, MANY_GATED, TALL, replace(TALL, gated=True))),
    *(("sm_80", case) for case in (MANY_GATED, SMALL, replace(SMALL, gated=True))),
    *(("gfx942", case) for case in (FEW, MANY_GATED, TALL)),
    *(("gfx950", case) for case in (GATED, MANY_WIDE)),
    ("sm_80", replace(FEW, dtype="fp16", plain=True, rows=1)),
    ("sm_90", replace(FEW, width=528)),  # the last block of a row is cut
    ("sm_90", replace(TALL, dtype="tf32")),
]
KERNELS = {False: "_linear_kernel", True: "_gated_linear_kernel"}


def plan_of(architecture: str, case: LinearCase) -> module.Plan:
    op = "gated_linear" if case.gated else "linear"
    device = _aot.ARCHITECTURES[architecture].device
    return module.choose_plan(device, op, DTYPES[case.dtype], case.rows, case.columns)


def depths(kernel: _aot.Compiled) -> set[str]:
    """Return the kinds of matrix instructions and how many products each sums: the last number of a shape."""
    patterns = (r"(HGMMA)\.64x\d+x(\d+)\.", r"(HMMA)\.168(\d+)\.", r"(v_mfma_f32_\d+x\d+x\d+).*", r"(UTCHMMA).*")
    found = (re.match(pattern, text) for text in kernel.instructions for pattern in patterns)
    return {"x".join(match.groups()) for match in found if match}


@pytest.mark.parametrize(("architecture", "case"), CASES, ids=str)
def test_fits(architecture: str, case: LinearCase) -> None:
    kernels = compiled(architecture, case.launch)
    assert list(kernels) == [KERNELS[case.gated]]
    [kernel] = kernels.values()
    assert not kernel.faults()
    assert not kernel.load_faults()
    if case.dtype != "fp32":
        assert not kernel.matrix_faults(plan_of(architecture, case).block_r)
    if architecture == "sm_80":  # these parameters also serve sm_86 and sm_89
        assert kernel.shared_bytes <= 99 * 1024


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_number_of_rows_meets_the_same_instruction(architecture: str) -> None:
    """What a row's bits rest on: whichever tile serves, as many products are summed at once, in the same order."""
    found = [depths(compiled(architecture, case.launch)[KERNELS[case.gated]]) for case in (FEW, MANY_WIDE)]
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_one_tile_up_to_64_rows() -> None:
    for architecture in _aot.ARCHITECTURES:
        plans = {plan_of(architecture, replace(FEW, rows=rows)) for rows in range(1, 65)}
        assert len(plans) == 1
        assert plan_of(architecture, MANY) not in plans


def test_llama_fills_the_device() -> None:
    """The matrices of Llama-3-8B, but for its 64 columns of 128: as many programs as an H200 has multiprocessors."""
    for columns in (4096, 6144, 14336, 128256):
        plan = plan_of("sm_90", replace(FEW, columns=columns))
        assert -(-columns // plan.block_n) >= 0.95 * 132


@pytest.mark.parametrize(
    ("change", "wrong"),
    [({"maxnreg": 64}, "stack"), ({"num_stages": 16}, "shared memory")],
    ids=["spills", "too-large"],
)
def test_gates_see_a_bad_configuration(change: dict, wrong: str, monkeypatch) -> None:
    choose = module.choose_plan

    def worse(*args) -> module.Plan:
        plan = choose(*args)
        return replace(plan, compile_options=plan.compile_options | change)

    monkeypatch.setattr(module, "choose_plan", worse)
    assert wrong in "; ".join(compiled("sm_80", FEW_WIDE.launch)[KERNELS[False]].faults())


def test_gates_see_narrow_loads() -> None:
    """Weights whose rows do not begin at multiples of 16 bytes."""

    def launch() -> None:
        wide = torch.empty(2048, 512 + 1, dtype=torch.bfloat16)
        module.linear_triton(wide[:4, :512], [wide[:, :512]], [], None)

    assert compiled("sm_90", launch)[KERNELS[False]].load_faults()


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
def test_few_compilations(gated: bool) -> None:
    """The rows do not recompile beyond the two tiles."""
    with _aot.count_variants("sm_90") as found:
        for rows in (*range(1, 70), 128, 1000):
            replace(GATED if gated else FEW, rows=rows).launch()
    assert [name for name, _ in found] == [KERNELS[gated]] * 2
