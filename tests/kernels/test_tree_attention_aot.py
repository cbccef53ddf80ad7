"""The shipped tree attention kernels, compiled for GPUs that are not here: no spills, right size and instructions."""

import itertools
from dataclasses import replace

import pytest
import torch

from specdec_kernels.cli.inspect import Case
from specdec_kernels.kernels import _aot, _common
from specdec_kernels.kernels import tree_attention as module

from .aot import compiled, load_faults, matrix_faults

NVIDIA = ["sm_80", "sm_90", "sm_100"]
ATTENTION, MERGE = "_tree_attention_kernel", "merge_splits_kernel"


def case(cache="bf16", dims=(128, 128), rows=64, page=0, dtype="bf16", with_options=True) -> Case:
    return Case("tree_attention", dtype, cache, dims, rows, page, with_options)


def block_m(architecture: str, case: Case) -> int:
    from specdec_kernels.cli.inspect import DTYPES

    device = _aot.ARCHITECTURES[architecture].device
    return module.choose_plan(device, DTYPES[case.dtype], DTYPES[case.cache], *case.dims, case.rows).block_m


# Each entry of the launch parameters for 16-bit caches, with every option on (the fullest kernel) and with none (the
# one used most). Then what differs besides: pages smaller and larger than a tile, stored bytes, fp32.
FULL = [case(dims=(d, d), rows=rows) for d in (64, 128, 256) for rows in (16, 64, 512)]
PLAIN = [replace(full, with_options=False) for full in FULL]
SOMEWHERE = [
    *itertools.product(["gfx950"], FULL[3:6]),
    ("sm_90", case(dims=(192, 128))),
    ("sm_80", case(dims=(80, 80))),
    ("sm_90", case(page=16)),
    ("sm_90", case(page=256, rows=16)),
    ("sm_80", case(cache="fp8", rows=16)),  # bytes taken apart
    ("sm_90", case(cache="fp8")),
    ("sm_100", case(cache="int8", rows=16)),
    ("gfx942", case(cache="fp8", rows=16)),
    ("sm_80", case(dtype="fp32", cache="fp32")),
    ("sm_90", case(dtype="fp32", cache="fp32")),
]
CASES = [*itertools.product(NVIDIA, FULL + PLAIN), *itertools.product(["gfx942"], FULL), *SOMEWHERE]


@pytest.mark.parametrize(("architecture", "case"), CASES, ids=str)
def test_fits(architecture: str, case: Case) -> None:
    kernels = compiled(architecture, case.launch)
    assert ATTENTION in kernels
    for kernel in kernels.values():
        assert not kernel.faults()
        assert kernel.programs_per_multiprocessor >= 1
    assert not matrix_faults(kernels[ATTENTION], block_m(architecture, case))
    assert not load_faults(kernels[ATTENTION], case.page > 0, case.cache in ("fp8", "int8"))


@pytest.mark.parametrize("case", FULL, ids=str)
def test_fits_smaller_gpus(case: Case) -> None:
    """The parameters of sm_80 also serve sm_86 and sm_89, which have 99 KB of shared memory."""
    assert compiled("sm_80", case.launch)[ATTENTION].shared_bytes <= 99 * 1024


def test_options_are_compiled_out() -> None:
    """Without options none of their instructions is left."""
    full, plain = (compiled("sm_90", case(rows=16, with_options=flag).launch)[ATTENTION] for flag in (True, False))
    assert plain.instructions.total() < 0.8 * full.instructions.total()
    assert full.count(r"LDG\.E\.U16.*")  # sinks
    assert not plain.count(r"LDG\.E\.U16.*")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (
            {
                "block_m": 128,
                "block_n": 64,
                "compile_options": {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True},
            },
            "stack",
        ),
        (
            {
                "block_m": 64,
                "block_n": 64,
                "compile_options": {"num_warps": 8, "num_stages": 5, "enable_fp_fusion": True},
            },
            "shared memory",
        ),
    ],
    ids=["spills", "too-large"],
)
def test_gates_see_a_bad_configuration(change: dict, wrong: str, monkeypatch) -> None:
    choose = module.choose_plan
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **change))
    kernel = compiled("sm_90", case(dims=(256, 256)).launch)[ATTENTION]
    assert wrong in "; ".join(kernel.faults())


def test_gates_see_narrow_loads() -> None:
    """A row stride that is not a multiple of 16 elements: the loads shrink, and the gate says so."""

    def launch() -> None:
        k = torch.empty(1, 512, 2, 64 + 1, dtype=torch.bfloat16)[..., :64]
        q, mask = torch.empty(1, 8, 8, 64, dtype=torch.bfloat16), torch.empty(1, 8, 1, dtype=torch.int64)
        options = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))
        module.tree_attention_triton(q, k, k, mask, torch.empty(1, dtype=torch.int32), **options)

    assert load_faults(compiled("sm_90", launch)[ATTENTION])


@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_few_compilations(paged: bool, group_size: int) -> None:
    """Batch, prefix and tree size do not recompile: at most two variants for a dtype, narrow and wide tiles."""
    options = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))
    with _aot.count_variants("sm_80") as found:
        for batch, num_nodes in itertools.product(range(1, 9), (5, 6, 16, 17, 26, 64)):
            q = torch.empty(batch, num_nodes, 2 * group_size, 64, dtype=torch.bfloat16)
            mask = torch.empty(batch, num_nodes, 1, dtype=torch.int64)
            prefix_len = torch.empty(batch, dtype=torch.int32)
            if paged:
                k = torch.empty(300, 16, 2, 64, dtype=torch.bfloat16)
                table = torch.empty(batch, 30 * batch, dtype=torch.int32)
                module.paged_tree_attention_triton(q, k, k, table, mask, prefix_len, **options)
            else:
                k = torch.empty(batch, 700 * batch, 2, 64, dtype=torch.bfloat16)
                module.tree_attention_triton(q, k, k, mask, prefix_len, **options)
    names = [name for name, _ in found]
    assert 1 <= names.count(ATTENTION) <= 2
    assert names.count(MERGE) <= 1


def test_pretended_device_is_undone() -> None:
    before = _common.device_of(torch.empty(1))
    with pytest.raises(ZeroDivisionError), _aot.compile_only("sm_80"):
        raise ZeroDivisionError
    assert _common.device_of(torch.empty(1)) == before
