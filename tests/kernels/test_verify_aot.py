"""The shipped verification kernels, compiled for GPUs that are not here: no spills, wide loads, few variants."""

import itertools
from dataclasses import replace

import pytest
import torch

from specdec_kernels.cli._kernel_cases import PhiloxCase, VerifyCase
from specdec_kernels.kernels import _aot
from specdec_kernels.kernels import verify as module

from .aot import compiled

STATISTICS, REST, FINISH = "_verify_statistics_kernel", "_verify_rest_kernel", "_verify_finish_kernel"
TREE = VerifyCase("verify_tree", "bf16", drawn=True)
CHAIN = VerifyCase("verify_chain", "bf16", drawn=True)
BLOCK = replace(CHAIN, block=True)
CHOSEN, TYPICAL = VerifyCase("verify_tree", "fp16"), VerifyCase("verify_tree_typical", "bf16")
GREEDY = VerifyCase("verify_tree_greedy", "fp32")
# A tree with draft logits, whose kernels are the largest, almost everywhere; each rule, dtype and option somewhere.
CASES = [
    *itertools.product(["sm_80", "sm_90", "sm_100", "gfx942"], [TREE]),
    *(("sm_90", case) for case in (CHAIN, GREEDY, replace(TREE, mapped=True))),
    ("sm_80", replace(BLOCK, dtype="fp32", mapped=True)),
    ("sm_90", replace(BLOCK, drawn=False)),
    ("sm_80", TYPICAL),
    ("sm_100", CHOSEN),
    ("gfx950", CHOSEN),
]


def load_faults(kernel: _aot.Compiled, case: VerifyCase) -> list[str]:
    """Require that tiles of logits are loaded 16 bytes a lane. A greedy final token needs no tile."""
    needs_none = case.op == "verify_tree_greedy" and kernel.name == FINISH
    return [] if needs_none or kernel.wide_loads() else ["no 16-byte loads"]


@pytest.mark.parametrize(("architecture", "case"), CASES, ids=str)
def test_fits(architecture: str, case: VerifyCase) -> None:
    kernels = compiled(architecture, case.launch)
    assert list(kernels) == ([STATISTICS, REST, FINISH] if case.drawn else [STATISTICS, FINISH])
    for kernel in kernels.values():
        assert not kernel.faults()
        assert kernel.programs_per_multiprocessor >= 1
        assert not load_faults(kernel, case)
    assert kernels[STATISTICS].programs_per_multiprocessor >= 2


@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
def test_philox_fits(architecture: str) -> None:
    kernels = compiled(architecture, PhiloxCase().launch)
    assert list(kernels) == ["_philox_uniforms_kernel"]
    assert not kernels["_philox_uniforms_kernel"].faults()


def test_gates_see_a_bad_configuration(monkeypatch) -> None:
    """Large tiles on few warps: registers run out."""
    choose = module.choose_plan
    options = {"num_warps": 2, "enable_fp_fusion": True}
    bad = {"block": 8192, "options": options, "statistics_options": options}
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **bad))
    assert any(kernel.faults() for kernel in compiled("sm_90", CHOSEN.launch).values())


def test_gates_see_narrow_loads() -> None:
    """A vocabulary that is no multiple of 16 bytes: the loads shrink, and the gate says so."""

    def launch() -> None:
        logits, ids = torch.empty(2, 16, 50_257, dtype=torch.bfloat16), torch.empty(2, 16, dtype=torch.int64)
        module.verify_tree_greedy_triton(ids, ids.int(), logits)

    assert load_faults(compiled("sm_90", launch)[STATISTICS], GREEDY)


@pytest.mark.parametrize("rule", ["tree", "chain", "block", "typical"])
def test_few_compilations(rule: str) -> None:
    """Batch, tree size and lengths do not recompile: one variant for a dtype, vocabulary and rule."""
    with _aot.count_variants("sm_80") as found:
        for batch, num_nodes in itertools.product((1, 2, 3, 8, 16), (2, 3, 6, 16, 17, 64)):
            ids, u, t = torch.empty(batch, num_nodes).long(), torch.empty(batch, num_nodes), torch.empty(batch)
            parents, lengths = torch.empty(1, num_nodes).int(), torch.empty(batch).int()
            logits = torch.empty(batch, num_nodes, 32_000, dtype=torch.bfloat16)
            if rule == "tree":
                module.verify_tree_triton(ids, parents, logits, logits, t, u, lengths, with_replacement=False)
            elif rule == "typical":
                module.verify_tree_typical_triton(ids, parents, logits, t, u, lengths, epsilon=0.0, delta=0.3)
            else:
                args = ids[:, 1:], logits, logits[:, 1:], t, u, lengths
                module.verify_chain_triton(*args, block=rule == "block")
    names = [name for name, _ in found]
    assert {names.count(name) for name in names} == {1}


def test_few_compilations_of_philox() -> None:
    from specdec_kernels.kernels.philox import philox_uniforms_triton

    with _aot.count_variants("sm_80") as found:
        for batch, count in itertools.product((1, 2, 16), (1, 2, 5, 16, 64, 1000)):
            seed = torch.empty(batch, dtype=torch.int64)
            philox_uniforms_triton(seed, seed, count)
    assert len(found) == 1
