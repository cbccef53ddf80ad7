"""Calls of the tree attention launchers, with the parameters that a test wants to force."""

from dataclasses import replace

import pytest
from torch import Tensor

from specdec_kernels.kernels import tree_attention as module
from tests.ops.attention_cases import Case
from tests.ops.test_tree_attention_paged import page_case

OPTIONS = ("scale", "softcap", "window", "sinks", "k_scale", "v_scale")


def attend(case: Case, page: int = 0, layout: str = "nhd", garbage: float = 100.0) -> tuple[Tensor, Tensor]:
    """Launch over the case's cache, or over pages of ``page`` rows with the same content."""
    options = {name: case.options.get(name) for name in OPTIONS}
    if page:
        return module.paged_tree_attention_triton(*page_case(case, page, layout, garbage), **options)
    return module.tree_attention_triton(*case.args(), **options)


def force_plan(monkeypatch: pytest.MonkeyPatch, **changes) -> None:
    """Change launch parameters: ``block_m``, ``min_split_len``, ``target_programs`` …"""
    choose = module.choose_plan
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **changes))


def force_splits(monkeypatch: pytest.MonkeyPatch, num_keys: int) -> None:
    """Let splits of about ``num_keys`` be worth their while; below 1024 keys the kernel takes five times the least."""
    force_plan(monkeypatch, min_split_len=num_keys // 5)


def block_m(case: Case) -> int:
    """Return how many packed rows share a tile."""
    return module.plan_of(case.q, case.k, case.v).block_m
