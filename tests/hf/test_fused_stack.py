"""Steps of prepared models in one call: the bits of the calls it replaces, and when it is not made."""

import pytest
import torch

from specdec_kernels.decoding.protocols import LayerPlan
from specdec_kernels.hf import _chunks
from specdec_kernels.hf.families import FAMILIES
from specdec_kernels.hf.fused_stack import STACKED_FAMILIES
from specdec_kernels.hf.prepare import prepare, restore
from specdec_kernels.hf.target import HFTarget

from ..marks import needs_native
from .test_bits import prefilled, tree
from .test_prepare import OpCounter, bf16_model, tokens  # noqa: F401 (a fixture)
from .tiny import VOCAB

pytestmark = needs_native


def model_kv_shape(model):
    """``(Hk, D)``."""
    return vars(model.model.layers[0])["forward"].kv_shape


def cached(target, model):
    """The rows of the prompt and the nodes in all layers; those never written are NaN in tests."""
    buffers = target.cache.claim_layers(torch.empty(1, 5, *model_kv_shape(model)))
    return [buffer[:, :11].nan_to_num(7) for buffer in buffers]


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
    before = cached(target, model)
    layers = model.model.layers
    for hooked, calls in ((layers[:1], 1), (layers[1:2], 2), (layers, 0)):
        handles = [layer.register_forward_hook(lambda *_: None) for layer in hooked]
        with OpCounter() as counter:
            assert torch.equal(target.forward(tokens[None, 6:], *tree([-1, 0, 0, 1, 3])).logits, logits)
        assert counter.calls["decoder_layers_"] == calls
        assert counter.calls["rotary_cache_write_"] == len(hooked)
        assert all(torch.equal(x, y) for x, y in zip(before, cached(target, model), strict=True))
        for handle in handles:
            handle.remove()
    restore(layers[1])
    with OpCounter() as counter:
        target.forward(tokens[None, 6:], *tree([-1, 0, 0, 1, 3]))
    assert counter.calls["decoder_layers_"] == 2
    assert "rotary_cache_write_" not in counter.calls


def test_a_hook_may_change_what_a_layer_gives(tokens):  # noqa: F811
    """The next call does not write to what a hook was given, or gave."""
    model = prepare(bf16_model())
    target, _ = prefilled(model, tokens[None, :6])
    seen = []

    def double(_, __, given):
        seen.extend((given, given.clone(), given * 2))
        return seen[-1]

    model.model.layers[1].register_forward_hook(double)
    logits = target.forward(tokens[None, 6:], *tree([-1, 0, 0, 1, 3])).logits
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[1] * 2)
    del model.model.forward
    assert torch.equal(target.forward(tokens[None, 6:], *tree([-1, 0, 0, 1, 3])).logits, logits)


PLANS = {
    "first": LayerPlan(stop=2),
    "last": LayerPlan(start=2),
    "skip": LayerPlan(skipped_attention=frozenset({1}), skipped_mlp=frozenset({2})),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_run_the_layers_between_in_one_call(name, tokens):  # noqa: F811
    """The same bits as layer by layer; the caller's hidden states stay."""
    model, plan = prepare(bf16_model(num_hidden_layers=5)), PLANS[name]
    target = HFTarget(model, 1, 40)
    target.tap(2)
    tapped = target.prefill(tokens[None, :6], torch.tensor([6], dtype=torch.int32)).tapped
    hidden = tapped[:, :5].clone() if plan.start else None
    arguments = tokens[None, 6:], *tree([-1, 0, 0, 1, 3]), plan
    with OpCounter() as counter:
        found = target.run_layers(*arguments, hidden=hidden)
    assert counter.calls["decoder_layers_"] == (2 if name == "skip" else 1)
    assert plan.start == 0 or torch.equal(hidden, tapped[:, :5])
    before = cached(target, model)
    del model.model.forward
    expected = target.run_layers(*arguments, hidden=hidden)
    assert all(torch.equal(x, y) for x, y in zip(found[:2], expected[:2], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(before, cached(target, model), strict=True))
    single = HFTarget(model, 1, 40)
    single.tap(2)
    assert torch.equal(single.prefill(tokens[None, :6], torch.tensor([6], dtype=torch.int32)).tapped, tapped)


@pytest.mark.parametrize(("parents", "calls"), [([-1, 0, 1, 2, 2], 1), ([-1, 0, 0, 1, 1], 0)], ids=["chain", "tree"])
def test_nodes_behind_a_chain_of_this_step_are_one_call(parents, calls, tokens):  # noqa: F811
    """Drafts that grow node by node; where later nodes do not see all earlier ones, layers run by themselves."""
    model, plan = prepare(bf16_model(num_hidden_layers=5)), LayerPlan(stop=3)
    target, _ = prefilled(model, tokens[None, :6])
    ids = tokens[None, 6:]
    whole = target.run_layers(ids, *tree(parents), plan).hidden
    before = cached(target, model)
    target.run_layers(ids[:, :3] + 1, *tree(parents[:3]), plan)
    first = target.run_layers(ids[:, :3], *tree(parents[:3]), plan).hidden
    mask, depths = tree(parents)
    with OpCounter() as counter:
        later = target.run_layers(ids[:, 3:], mask, depths[:, 3:], plan, first_node=3).hidden
    assert counter.calls["decoder_layers_"] == calls
    assert torch.equal(torch.cat([first, later], dim=1), whole)
    assert all(torch.equal(x, y) for x, y in zip(before, cached(target, model), strict=True))


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


@pytest.mark.parametrize("name", ["self_attn", "mlp", "mlp.act_fn"])
def test_hooked_and_exchanged_blocks_are_run(name, tokens):  # noqa: F811
    model = prepare(bf16_model("llama"))
    block, seen = model.model.layers[1].get_submodule(name), []
    with block.register_forward_hook(lambda *_: seen.append("hook")):
        prefilled(model, tokens[None, :6])
    block.forward = lambda *args, **kwargs: (seen.append("own"), type(block).forward(block, *args, **kwargs))[1]
    prefilled(model, tokens[None, :6])
    assert seen == ["hook", "own"]
