"""Prepared models keep no second copy of their weights: not from preparing, not from running."""

import gc
from types import FunctionType, ModuleType

import pytest
import torch

from specdec_kernels.hf.fused_layer import FUSED_FAMILIES, OwnForward
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.hf.target import HFTarget

from ..marks import needs_native
from .test_bits import int32, tree
from .tiny import VOCAB, tiny_model

pytestmark = needs_native


def storages(model):
    """Return address and bytes of all memory that tensors reachable from a model hold, forwards of ours included."""
    found, seen, waiting = set(), set(), [model]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType, str)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.add((item.untyped_storage().data_ptr(), item.untyped_storage().nbytes()))
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple, set)):
            waiting += item
        else:
            waiting += getattr(item, "__dict__", {}).values()
    return found


@pytest.mark.parametrize("family", [*sorted(FUSED_FAMILIES), "gemma2", "mixtral"])
def test_running_a_prepared_model_leaves_nothing_behind(family):
    model = tiny_model(family).bfloat16()
    before = storages(model)
    assert len(before) >= len({parameter.data_ptr() for parameter in model.parameters()})
    prepare(model)
    target = HFTarget(model, 2, 24)
    target.prefill(torch.randint(3, VOCAB, (2, 9)), int32(9, 6))
    target.forward(torch.randint(3, VOCAB, (2, 4)), *tree([-1, 0, 0, 1]))
    del target
    gc.collect()
    assert storages(model) == before
    # What this looks at holds what a forward of ours would keep.
    forward = next(vars(module)["forward"] for module in model.modules() if "forward" in vars(module))
    assert isinstance(forward, OwnForward)
    forward.packed = [next(model.parameters()).clone()]
    assert len(storages(model) - before) == 1
