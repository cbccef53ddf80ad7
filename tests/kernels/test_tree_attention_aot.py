"""The shipped tree attention kernels, compiled for GPUs that are not here: no spills, right size and instructions."""

import argparse
import itertools
import os
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton

from specdec_kernels.cli import inspect
from specdec_kernels.cli._kernel_cases import DTYPES, Case, tree_attention_cases
from specdec_kernels.cli.inspect import compile_cases
from specdec_kernels.kernels import _aot, _common
from specdec_kernels.kernels import tree_attention as module
from specdec_kernels.kernels._attention_plan import fitting_tile

from .aot import compiled

NVIDIA = ["sm_80", "sm_90", "sm_100"]
ATTENTION, MERGE = "_tree_attention_kernel", "merge_splits_kernel"


def case(cache="bf16", dims=(128, 128), rows=64, page=0, dtype="bf16", with_options=True) -> Case:
    return Case(dtype, cache, dims, rows, page, with_options)


def all_faults(architecture: str, case: Case, kernels: list[_aot.Compiled]) -> list[str]:
    """Return what is wrong with the kernels of a case, by all gates."""
    return [f"{kernel.name}: {fault}" for kernel in kernels for fault in case.faults(architecture, kernel)]


# The fullest kernels of the commonest entries; then what differs besides: pages smaller and larger than a tile, stored
# bytes, fp32. The slow test below has every entry.
FULL = [case(rows=rows) for rows in (16, 64, 512)]
SOMEWHERE = [
    ("gfx950", case(with_options=False)),
    ("sm_90", case(dims=(192, 128))),
    ("sm_90", case(dims=(256, 256))),
    ("sm_80", case(dims=(80, 80))),
    ("sm_90", case(dims=(192, 192))),
    ("sm_90", case(dtype="fp16", cache="fp16", dims=(96, 96), page=16)),
    ("sm_80", case(dims=(112, 112), page=16)),
    ("sm_100", case(rows=512, page=16, with_options=False)),
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
    """Without options none of their instructions is left, and with one of them none of the others'."""
    full, plain = (case(rows=16, with_options=flag) for flag in (True, False))
    kernels = {name: compiled("sm_90", one.launch)[ATTENTION] for name, one in (("all", full), ("none", plain))}
    for name in ("softcap", "window", "sinks"):
        kernels[name] = compiled("sm_90", partial(full.launch, only=name))[ATTENTION]
    sizes = {name: kernel.instructions.total() for name, kernel in kernels.items()}
    assert sizes["none"] < 0.8 * sizes["all"]
    assert all(sizes["none"] < sizes[name] < sizes["all"] for name in ("softcap", "window", "sinks")), sizes
    with_sinks = {name for name, kernel in kernels.items() if kernel.count(r"LDG\.E\.U16.*")}
    assert with_sinks == {"all", "sinks"}


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


def two_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all tiles be computed by two warps."""
    change = {"compile_options": {"num_warps": 2, "num_stages": 2, "enable_fp_fusion": True}}
    choose = module.choose_plan
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **change))


def test_gates_see_the_wrong_matrix_unit(monkeypatch) -> None:
    """Two warps cannot issue wgmma."""
    two_warps(monkeypatch)
    kernel = compiled("sm_90", case(dims=(64, 64), with_options=False).launch)[ATTENTION]
    assert "no wgmma" in "; ".join(kernel.matrix_faults(64))


def test_gates_see_scratch_on_amd(monkeypatch) -> None:
    change = {"block_m": 128, "block_n": 64, "compile_options": {"num_warps": 2, "num_stages": 2}}
    choose = module.choose_plan
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **change))
    kernel = compiled("gfx942", case(dims=(128, 128), with_options=False).launch)[ATTENTION]
    assert "stack" in "; ".join(kernel.faults())


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_gates_see_narrow_loads(architecture: str) -> None:
    """A row stride that is not a multiple of 16 elements: the loads shrink, and the gate says so."""

    def launch() -> None:
        k = torch.empty(1, 512, 2, 64 + 1, dtype=torch.bfloat16)[..., :64]
        q, mask = torch.empty(1, 8, 8, 64, dtype=torch.bfloat16), torch.empty(1, 8, 1, dtype=torch.int64)
        options = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))
        module.tree_attention_triton(q, k, k, mask, torch.empty(1, dtype=torch.int32), **options)

    faults = compiled(architecture, launch)[ATTENTION].load_faults(has_sinks=False)
    assert ("no asynchronous 16-byte loads" in faults) == (architecture == "sm_90")
    assert any("loads of single values" in fault for fault in faults)


def count_variants(architecture: str, dtype: str, cache: str, paged: bool, group_size: int, dims=(64,)) -> Counter[str]:
    """Return how many variants of each kernel batch, prefix and tree size make."""
    options = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))
    with _aot.count_variants(architecture) as found:
        for batch, num_nodes, dim in itertools.product(range(1, 9), (5, 6, 16, 17, 26, 64), dims):
            q = torch.empty(batch, num_nodes, 2 * group_size, dim, dtype=DTYPES[dtype])
            mask = torch.empty(batch, num_nodes, 1, dtype=torch.int64)
            prefix_len = torch.empty(batch, dtype=torch.int32)
            if paged:
                k = torch.empty(300, 16, 2, dim, dtype=DTYPES[cache])
                table = torch.empty(batch, 30 * batch, dtype=torch.int32)
                module.paged_tree_attention_triton(q, k, k, table, mask, prefix_len, **options)
            else:
                k = torch.empty(batch, 700 * batch, 2, dim, dtype=DTYPES[cache])
                module.tree_attention_triton(q, k, k, mask, prefix_len, **options)
    return Counter(name for name, _ in found)


KINDS = [("sm_80", "bf16", "bf16", group_size) for group_size in (1, 3, 4, 7, 8)]
KINDS += [("sm_90", "bf16", "bf16", 4), ("sm_90", "fp16", "fp16", 7), ("sm_80", "fp16", "fp16", 4)]
KINDS += [("sm_80", "fp32", "fp32", 4), ("sm_90", "fp32", "fp32", 7), ("sm_80", "bf16", "fp8", 4)]
KINDS += [("sm_90", "fp16", "fp8", 7), ("sm_100", "bf16", "int8", 4)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_few_compilations(paged: bool, kind: tuple[str, str, str, int]) -> None:
    """Batch, prefix and tree size do not recompile: at most two variants for a dtype, narrow and wide tiles."""
    architecture, dtype, cache, group_size = kind
    found = count_variants(architecture, dtype, cache, paged, group_size)
    assert 1 <= found[ATTENTION] <= 2
    assert found[MERGE] <= 1


def test_head_dims_compile_again() -> None:
    """The count can exceed its bound: of two head dims it does."""
    found = count_variants("sm_90", "bf16", "bf16", paged=False, group_size=1, dims=(64, 128))
    assert found[ATTENTION] > 2
    assert found[MERGE] > 1


@pytest.mark.skipif("EXPECTED_TRITON" not in os.environ, reason="make aot-oldest names the version it wants")
def test_this_is_the_triton_that_was_asked_for() -> None:
    assert triton.__version__ == os.environ["EXPECTED_TRITON"]


def test_pretended_device_is_undone() -> None:
    before = _common.device_of(torch.empty(1))
    with pytest.raises(ZeroDivisionError), _aot.compile_only("sm_80"):
        raise ZeroDivisionError
    assert _common.device_of(torch.empty(1)) == before


def inspect_exit_code(found: Case, monkeypatch) -> int:
    """Run the command for one case on sm_90."""
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    monkeypatch.setitem(inspect.CASES, "tree_attention", lambda everything: iter([found]))
    return inspect.run(parser.parse_args(["--op", "tree_attention", "--arch", "sm_90"]))


def test_inspect_shows_what_passes_and_what_does_not(monkeypatch, capsys) -> None:
    """A line for each kernel; the exit code tells when one lacks what the gates above ask for."""
    shipped = case(dims=(64, 64), with_options=False)
    assert inspect_exit_code(shipped, monkeypatch) == 0
    header, attention, merge = capsys.readouterr().out.splitlines()
    assert "registers" in header
    assert attention.split()[:3] == ["sm_90", "tree_attention", "bf16-D64-rows64"]
    assert "wgmma" in attention
    assert merge.split()[:2] == ["sm_90", "merge_splits"]
    two_warps(monkeypatch)
    assert inspect_exit_code(shipped, monkeypatch) == 1
    assert "no wgmma" in capsys.readouterr().out
