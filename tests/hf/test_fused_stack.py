"""Steps of prepared models in one call: the bits of the calls it replaces, and when it is not made."""

import pytest
import torch

from specdec_kernels.hf import _chunks
from specdec_kernels.hf.families import FAMILIES
from specdec_kernels.hf.fused_stack import STACKED_FAMILIES
from specdec_kernels.hf.prepare import prepare, restore

from ..marks import needs_native
from .test_bits import prefilled, tree
from .test_prepare import OpCounter, bf16_model, tokens  # noqa: F401 (a fixture)
from .tiny import VOCAB

pytestmark = needs_native


def model_kv_shape(model):
    """``(Hk, D)``."""
    return vars(model.model.layers[0])["forward"].kv_shape


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_whole_steps_of_most_are_one_call_with_the_bits_of_eight(family, tokens):  # noqa: F811
    model = prepare(bf16_model(family))
    target, _ = prefilled(model, tokens[None, :6])
    with OpCounter() as counter:
        logits = target.forward(tokens[None, 6:], *tree([-1, 0, 0, 1, 3])).logits
    if family not in STACKED_FAMILIES:
        assert "decoder_layers_" not in counter.calls
        return
    assert dict(counter.calls) == {"decoder_layers_": 1, "rms_norm": 1, "linear": 1}
    before = [buffer.clone() for buffer in target.cache.claim_layers(torch.empty(1, 5, *model_kv_shape(model)))]
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with OpCounter() as counter:
        assert torch.equal(target.forward(tokens[None, 6:], *tree([-1, 0, 0, 1, 3])).logits, logits)
    assert "decoder_layers_" not in counter.calls
    after = target.cache.claim_layers(torch.empty(1, 5, *model_kv_shape(model)))
    assert all(torch.equal(x[:, :11], y[:, :11]) for x, y in zip(before, after, strict=True))
    handle.remove()
    restore(model.model.layers[1])
    with OpCounter() as counter:
        target.forward(tokens[None, 6:], *tree([-1, 0, 0, 1, 3]))
    assert "decoder_layers_" not in counter.calls


def test_a_prompt_is_one_call_a_chunk(tokens, monkeypatch):  # noqa: F811
    """The first chunk of a target's life, too."""
    monkeypatch.setattr(_chunks, "PREFILL_CHUNK", 4)
    model = prepare(bf16_model())
    with OpCounter() as counter:
        output = prefilled(model, tokens[None, :9])[1]
    assert dict(counter.calls) == {"decoder_layers_": 3, "rms_norm": 3, "linear": 3}
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert torch.equal(prefilled(model, tokens[None, :9])[1].logits, output.logits)
    handle.remove()


def test_rows_that_ended_are_left_out_of_the_one_call_too():
    """A batch of which two rows go on, with the bits of a batch of these two."""
    model = prepare(bf16_model())
    prompts = torch.randint(3, VOCAB, (4, 6))
    target, _ = prefilled(model, prompts, 4)
    few, _ = prefilled(model, prompts[[1, 3]], 2)
    target.run_only([1, 3])
    ids, shape = torch.randint(3, VOCAB, (4, 5)), tree([-1, 0, 0, 1, 3])
    with OpCounter() as counter:
        logits = target.forward(ids, *shape).logits
    assert counter.calls["decoder_layers_"] == 1
    assert torch.equal(logits[[1, 3]], few.forward(ids[[1, 3]], *shape).logits)
