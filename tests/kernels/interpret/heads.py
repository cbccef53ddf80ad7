"""Calls of the Medusa launchers, with the launch parameters that a test wants to force."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec_kernels.kernels import medusa_project as module
from tests.ops.test_medusa_project import head_by_head


def project_topk(inputs, k: int, vocab_map: Tensor | None = None, include_base: bool = False) -> tuple[Tensor, ...]:
    """Launch the kernels over ``hidden, w_res, b_res, w_out``."""
    return module.medusa_project_topk_triton(*inputs, k, vocab_map=vocab_map, include_base=include_base)


def topk_of(logits: Tensor, k: int) -> tuple[Tensor, ...]:
    """Launch the kernels so that the logits are exactly ``logits (V,)``."""
    one, no_layer = torch.ones(1, 1, dtype=logits.dtype), torch.zeros(1, 0, 1, 1, dtype=logits.dtype)
    return tuple(t[0, 0] for t in project_topk((one, no_layer, None, logits[:, None]), k))


def force_plan(monkeypatch: pytest.MonkeyPatch, **changes) -> None:
    """Change launch parameters: ``block_r``, ``block_n``, ``block_c``, ``target_programs`` …"""
    choose = module.choose_plan
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **changes))


def law(inputs, include_base: bool) -> Tensor:
    """Return the logits of the loop over heads, in the dtype of the inputs."""
    logits = head_by_head(*inputs)
    base = head_by_head(inputs[0], inputs[1][:1, :0], None, inputs[3]) if include_base else logits[:, :0]
    return torch.cat([base, logits], dim=1)
