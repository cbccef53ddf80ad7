"""The shipped tree attention kernels, compiled for GPUs that are not here: no spills, right size and instructions."""

import itertools
import os
from dataclasses import replace

import pytest
import torch
import triton

from specdec_kernels.cli._kernel_cases import DTYPES, Case, tree_attention_cases
from specdec_kernels.cli.inspect import compile_cases
from specdec_kernels.kernels import _aot, _common
from specdec_kernels.kernels import tree_attention as module
from specdec_kernels.kernels._attention_plan import fitting_tile

from .aot import compiled, load_faults, matrix_faults

NVIDIA = ["sm_80", "sm_90", "sm_100"]
ATTENTION, MERGE = "_tree_attention_kernel", "merge_splits_kernel"


def case(cache="bf16", dims=(128, 128), rows=64, page=0, dtype="bf16", with_options=True) -> Case:
    return Case("tree_attention", dtype, cache, dims, rows, page, with_options)


def all_faults(architecture: str, case: Case, kernels: list[_aot.Compiled]) -> list[str]:
    """Return what is wrong with the kernels of a case, by all gates."""
    device, precision = _aot.ARCHITECTURES[architecture].device, "tf32" if case.dtype == "tf32" else "ieee"
    dtypes = DTYPES[case.dtype], DTYPES[case.cache]
    plan = module.choose_plan(device, *dtypes, *case.dims, case.rows, precision, case.aligned)
    found = [f"{kernel.name}: {fault}" for kernel in kernels for fault in kernel.faults()]
    found += ["does not fit"] * any(kernel.programs_per_multiprocessor < 1 for kernel in kernels)
    attention = {kernel.name: kernel for kernel in kernels}[ATTENTION]
    if case.dtype != "fp32" or architecture.startswith("gfx"):  # NVIDIA's matrix units know no IEEE products
        found += matrix_faults(attention, plan.block_m)
    return found if not case.aligned else found + load_faults(attention, case.page > 0, case.cache in ("fp8", "int8"))


# The fullest kernels of the commonest entries; then what differs besides: pages smaller and larger than a tile, stored
# bytes, fp32. The slow test below has every entry.
FULL = [case(rows=rows) for rows in (16, 64, 512)]
SOMEWHERE = [
    ("gfx950", case()),
    ("sm_90", case(dims=(192, 128))),
    ("sm_90", case(dims=(256, 256))),
    ("sm_80", case(dims=(80, 80))),
    ("sm_90", case(page=16)),
    ("sm_90", case(page=256, rows=16)),
    ("sm_80", case(cache="fp8", rows=16)),  # bytes taken apart
    ("sm_90", case(cache="fp8")),
    ("sm_100", case(cache="int8", rows=16)),
    ("gfx942", case(cache="fp8", rows=16)),
    ("sm_80", case(dtype="fp32", cache="fp32")),
    ("sm_80", case(dtype="fp32", cache="fp32", dims=(256, 256), with_options=False)),  # the fullest of these
    ("sm_90", case(dtype="fp32", cache="fp32")),
    ("sm_90", case(dtype="tf32", cache="tf32")),
]
CASES = [*itertools.product([*NVIDIA, "gfx942"], FULL), *SOMEWHERE]


@pytest.mark.parametrize(("architecture", "case"), CASES, ids=str)
def test_fits(architecture: str, case: Case) -> None:
    assert not all_faults(architecture, case, list(compiled(architecture, case.launch).values()))


@pytest.mark.slow
@pytest.mark.parametrize("with_options", [True, False], ids=["options", "plain"])
@pytest.mark.parametrize("architecture", _aot.ARCHITECTURES)
def test_every_configuration_fits(architecture: str, with_options: bool) -> None:
    """Every entry of the launch parameters, for every kind of cache: ten minutes of processor time in all."""
    if architecture == "gfx942" and triton.__version__.startswith("3.6."):
        pytest.skip("Triton 3.6 keeps 20 to 28 bytes of scratch memory in some tiles on gfx942, later ones do not")
    cases = [case for case in tree_attention_cases() if case.with_options == with_options]
    wrong = []
    num_processes = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for _, one, kernels in compile_cases([(architecture, one) for one in cases], max(1, num_processes)):
        wrong += [f"{one}: {fault}" for fault in all_faults(architecture, one, kernels)]
    assert not wrong


def test_every_entry_has_a_case() -> None:
    """The cases above reach every tile of every file."""
    for architecture in _aot.ARCHITECTURES.values():
        parameters = _common.launch_parameters("tree_attention", architecture.device.names)
        unaligned = parameters.get("unaligned", {})
        kinds_of_cache = [parameters[kind] for kind in ("fp16", "quantised", "fp32", "tf32")] + list(unaligned.values())
        tiles = {id(tile) for dims in kinds_of_cache for entry in dims.values() for tile in entry}
        for one in tree_attention_cases():
            kinds = {one.cache: "fp16", "fp32": "fp32", "tf32": "tf32"}
            entries = parameters if one.aligned else unaligned or parameters
            entry = entries[kinds.get(one.dtype, "quantised")][str(_common.block(max(*one.dims, 64)))]
            tiles.discard(id(fitting_tile(entry, one.rows, one.dims[1])))
        assert not tiles


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


def test_gates_see_the_wrong_matrix_unit(monkeypatch) -> None:
    """Two warps cannot issue wgmma."""
    change = {"compile_options": {"num_warps": 2, "num_stages": 2, "enable_fp_fusion": True}}
    choose = module.choose_plan
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **change))
    kernel = compiled("sm_90", case(dims=(64, 64), with_options=False).launch)[ATTENTION]
    assert "no wgmma" in "; ".join(matrix_faults(kernel, 64))


def test_gates_see_scratch_on_amd(monkeypatch) -> None:
    change = {"block_m": 128, "block_n": 64, "compile_options": {"num_warps": 2, "num_stages": 2}}
    choose = module.choose_plan
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **change))
    kernel = compiled("gfx942", case(dims=(128, 128), with_options=False).launch)[ATTENTION]
    assert "stack" in "; ".join(kernel.faults())


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


@pytest.mark.skipif("EXPECTED_TRITON" not in os.environ, reason="make aot-oldest names the version it wants")
def test_this_is_the_triton_that_was_asked_for() -> None:
    assert triton.__version__ == os.environ["EXPECTED_TRITON"]


def test_pretended_device_is_undone() -> None:
    before = _common.device_of(torch.empty(1))
    with pytest.raises(ZeroDivisionError), _aot.compile_only("sm_80"):
        raise ZeroDivisionError
    assert _common.device_of(torch.empty(1)) == before
