"""Prepared models: the same results by our kernels, and from outside the same model."""

import copy
import io
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels import _native
from specdec_kernels.decoding.protocols import LayerPlan
from specdec_kernels.hf import fused_layer
from specdec_kernels.hf.families import FAMILIES
from specdec_kernels.hf.fused_layer import FUSED_FAMILIES, OwnForward
from specdec_kernels.hf.generate import generate
from specdec_kernels.hf.prepare import has_independent_rows, is_prepared, prepare, restore
from specdec_kernels.hf.target import HFTarget

from ..marks import needs_native
from .half_precision import equal_bits
from .test_bits import DENSE, PARENTS, PATHS, int32, one_by_one, prefilled, tree
from .test_generate import medusa
from .tiny import VOCAB, path_logits, tiny_model

pytestmark = needs_native


def bf16_model(family="llama", **options):
    return tiny_model(family, **options).bfloat16()


def own_forwards(model):
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), OwnForward)]


class OpCounter(TorchDispatchMode):
    """Count the calls of our ops."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "specdec_kernels":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def counted(model, tokens):
    """Return which of our ops a prompt takes, and how often, where layers are not one call (`test_fused_stack`)."""
    target, stack = HFTarget(model, 1, 40), vars(model.base_model).pop("forward", None)
    with OpCounter() as counter:
        target.prefill(tokens[None], int32(len(tokens)))
    if stack is not None:
        vars(model.base_model)["forward"] = stack
    return dict(counter.calls)


def prompt_logits(model, tokens):
    """Return the logits ``(len, V)`` of a chain in `HFTarget`."""
    return HFTarget(model, 1, 40).forward(tokens[None], *tree(list(range(-1, len(tokens) - 1)))).logits[0]


def assert_same_state(state, expected):
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.fixture
def tokens():
    return torch.randint(3, VOCAB, (11,))


@pytest.mark.parametrize("run", [path_logits, prompt_logits], ids=["forward", "HFTarget"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_the_models_own_up_to_rounding(family, run, tokens):
    model = bf16_model(family)
    exact = path_logits(copy.deepcopy(model).double(), tokens)
    plain = path_logits(model, tokens).double()
    with torch.no_grad():
        prepared = run(prepare(model), tokens).double()
    ulp = 2.0**-7 * exact.abs().max()
    assert (prepared - exact).abs().max() <= 2 * (plain - exact).abs().max() + 4 * ulp


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_of_llama_and_its_like_are_eight_calls(family, tokens):
    model = prepare(bf16_model(family))
    calls, layers = counted(model, tokens), model.config.num_hidden_layers
    assert calls["tree_attention"] == layers
    if family not in FUSED_FAMILIES:
        assert "gated_linear" not in calls
        return
    fused = {"rms_norm": 2 * layers, "rotary_cache_write_": layers, "gated_linear": layers, "linear": 3 * layers + 1}
    assert calls == fused | {"tree_attention": layers}


@equal_bits
@pytest.mark.parametrize("family", DENSE)
def test_prompts_and_trees_give_the_bits_of_single_steps(family, tokens):
    model = prepare(bf16_model(family))
    expected = one_by_one(model, tokens)
    for length in (1, 2, 11):
        assert torch.equal(prefilled(model, tokens[None, :length])[1].logits[0, 0], expected[length - 1])
    target, _ = prefilled(model, tokens[None, :6])
    assert torch.equal(target.forward(tokens[None, 6:], *tree(list(range(-1, 4)))).logits[0], expected[6:])
    nodes = torch.randint(3, VOCAB, (len(PARENTS),))
    branches = target.forward(nodes[None], *tree(PARENTS)).logits[0]
    for path in PATHS:
        assert torch.equal(branches[path], one_by_one(model, torch.cat([tokens[:6], nodes[path]]))[6:])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_from_outside_it_is_the_same_model(family, tokens):
    model = bf16_model(family)
    before, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    assert prepare(model) is model
    path_logits(model, tokens)
    for _ in range(2):
        assert_same_state(model.state_dict(), state)
        assert [type(module) for module in model.modules()] == classes
        assert all(have is before[name] for name, have in model.named_parameters(remove_duplicate=True))
        assert own_forwards(model) == [] or is_prepared(model)
        assert restore(model) is model
    assert own_forwards(model) == []


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_independent_rows_are_claimed_for_dense_models_alone(family):
    model = bf16_model(family)
    assert not has_independent_rows(model)
    assert has_independent_rows(prepare(model)) == (family in DENSE)
    assert not has_independent_rows(model.float())


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (1, 0), (0, 2), (5,), ()], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rows_do_not_depend_on_their_number(shape, family):
    layers = prepare(bf16_model(family)).model.layers[0].self_attn
    x = torch.randn(*shape, 64).bfloat16()
    many = torch.cat([x.reshape(-1, 64), torch.randn(7, 64).bfloat16()])
    with torch.inference_mode():
        for layer in (layers.q_proj, layers.o_proj):
            y = layer(x)
            assert y.shape == (*shape, layer.out_features)
            assert torch.equal(y.reshape(-1, layer.out_features), layer(many)[: x.numel() // 64])


@equal_bits
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_layers_run_one_node_at_a_time_give_the_bits_of_whole_steps(family, tokens):
    model = prepare(bf16_model(family))
    target, _ = prefilled(model, tokens[None, :8])
    shallow = []
    for node in range(3):
        mask, depths = tree(list(range(-1, node)))
        output = target.run_layers(
            tokens[None, 8 + node : 9 + node], mask, depths[:, node:], LayerPlan(stop=2), first_node=node
        )
        shallow.append(output.hidden)
    output = target.run_layers(
        tokens[None, 8:], *tree([-1, 0, 1]), LayerPlan(start=2), hidden=torch.cat(shallow, dim=1)
    )
    assert torch.equal(output.logits[0], one_by_one(model, tokens)[8:])


@pytest.mark.parametrize("plan", [{"skipped_attention": {1}}, {"skipped_mlp": {1}}], ids=lambda plan: next(iter(plan)))
def test_blocks_can_be_skipped(plan, tokens):
    logits = []
    model = bf16_model(initializer_range=0.5)
    for each in (copy.deepcopy(model).double(), model, prepare(copy.deepcopy(model))):
        target, _ = prefilled(each, tokens[None, :8])
        skipped = LayerPlan(**{name: frozenset(layers) for name, layers in plan.items()})
        logits.append(target.run_layers(tokens[None, 8:], *tree([-1, 0, 0]), skipped).logits[0].double())
        whole = target.forward(tokens[None, 8:], *tree([-1, 0, 0])).logits[0].double()
        assert (whole - logits[-1]).abs().max() > 0.1 * whole.abs().max()
    exact, plain, prepared = logits
    assert (prepared - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2.0**-5 * exact.abs().max()


def test_hooks_of_parts_are_called(tokens):
    model, seen = prepare(bf16_model()), []
    plain = counted(model, tokens)
    handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    logits = prompt_logits(model, tokens)
    assert seen == [1]
    assert counted(model, tokens)["gated_linear"] == plain["gated_linear"] - 1
    handle.remove()
    assert counted(model, tokens) == plain
    ulp = 2.0**-7 * logits.abs().max()
    assert (logits - prompt_logits(model, tokens)).abs().max() <= 16 * ulp


def test_parts_that_were_exchanged_are_used(tokens):
    model = prepare(bf16_model())
    expected = prompt_logits(model, tokens)
    down = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = nn.Sequential(down, nn.ReLU())
    assert not torch.equal(prompt_logits(model, tokens), expected)
    model.model.layers[0].mlp.down_proj = down
    assert torch.equal(prompt_logits(model, tokens), expected)


def test_before_and_after_casting_are_the_same(tokens):
    late = prepare(bf16_model())
    early = prepare(tiny_model())
    assert torch.equal(prompt_logits(early, tokens), prompt_logits(tiny_model(), tokens))
    assert counted(early, tokens).keys() == {"tree_attention"}
    early.to(torch.bfloat16)
    assert torch.equal(prompt_logits(early, tokens), prompt_logits(late, tokens))
    assert counted(early, tokens) == counted(late, tokens)
    late.to(torch.float32)
    assert torch.equal(prompt_logits(late, tokens), prompt_logits(bf16_model().float(), tokens))


def test_preparing_and_restoring_twice_changes_nothing(tokens):
    model = bf16_model()
    plain = path_logits(model, tokens)
    names = own_forwards(prepare(model))
    assert own_forwards(prepare(model)) == names
    assert torch.equal(path_logits(restore(restore(model)), tokens), plain)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
def test_other_weights_can_be_loaded(assign, tied, tokens):
    model, other = (bf16_model(tie_word_embeddings=tied) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    prepare(model)
    prompt_logits(model, tokens)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(prompt_logits(model, tokens), prompt_logits(prepare(other), tokens))


def test_a_weight_that_is_set_or_changed_is_used(tokens):
    model, other = prepare(bf16_model(tie_word_embeddings=True)), bf16_model(tie_word_embeddings=True)
    prompt_logits(model, tokens)
    for each in (model, other):
        with torch.no_grad():
            each.get_input_embeddings().weight.mul_(1.5)
        each.model.layers[1].self_attn.k_proj.weight = nn.Parameter(torch.ones(32, 64, dtype=torch.bfloat16))
    assert torch.equal(prompt_logits(model, tokens), prompt_logits(prepare(other), tokens))


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
def test_can_be_saved(tied, tmp_path):
    model = bf16_model(tie_word_embeddings=tied)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    prepare(model).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same_state(loaded.state_dict(), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_prepared_and_separate(how, tokens):
    model = prepare(bf16_model())
    logits = prompt_logits(model, tokens)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    restore(model)
    assert own_forwards(model) == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert counted(other, tokens)["gated_linear"] == model.config.num_hidden_layers
    assert torch.equal(prompt_logits(other, tokens), logits)
    assert own_forwards(restore(other)) == []


@pytest.mark.parametrize("restores", [True, False], ids=["restored", "prepared"])
def test_can_be_trained(restores, tokens):
    model, other = prepare(bf16_model()), bf16_model()
    prompt_logits(model, tokens)
    if restores:
        restore(model)
    for each in (model, other):
        each.train()(tokens[None], labels=tokens[None]).loss.backward()
    assert torch.equal(model.lm_head.weight.grad, other.lm_head.weight.grad)


def test_compiles_as_before(tokens):
    layer = prepare(bf16_model()).model.layers[0].self_attn.o_proj
    x = torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), nn.functional.linear(x, layer.weight))


@equal_bits
def test_speculation_changes_no_text(tokens):
    model = prepare(bf16_model(initializer_range=0.5))
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    inputs = {"input_ids": tokens[None], "attention_mask": torch.ones(1, 11, dtype=torch.int64)}
    plain = generate(model, **inputs, drafter=None, **options)
    ours = generate(model, **inputs, drafter=medusa(model), **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, plain.logits, strict=True))


class _Other(nn.Linear):
    """A layer of another kind, as quantizers and adapters bring them."""


def with_other_layer(model):
    model.model.layers[1].mlp.up_proj = _Other(64, 48, bias=False)
    return model


def with_own_forward(model):
    model.model.layers[2].self_attn.k_proj.forward = lambda x: x
    return model


REFUSED = {
    "no model": (lambda: nn.Linear(3, 3), TypeError, "must be a transformers.PreTrainedModel"),
    "training": (lambda: tiny_model().train(), RuntimeError, "training mode"),
    "device": (lambda: tiny_model().to("meta"), NotImplementedError, "on the CPU or a GPU, got one on meta"),
    "layer": (lambda: with_other_layer(tiny_model()), NotImplementedError, r"layers.1.mlp.up_proj is a _Other"),
    "forward": (lambda: with_own_forward(tiny_model()), NotImplementedError, "k_proj has a forward of its own already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_and_leaves_the_model_alone(case):
    make, error, message = REFUSED[case]
    model = make()
    with pytest.raises(error, match=message):
        prepare(model)
    assert own_forwards(model) == []


def test_a_bias_in_one_of_three_keeps_the_layers_modules(tokens):
    model = bf16_model()
    model.model.layers[2].self_attn.k_proj.bias = nn.Parameter(torch.zeros(32).bfloat16())
    assert counted(prepare(model), tokens)["gated_linear"] == model.config.num_hidden_layers - 1


def test_refuses_without_native_kernels_on_the_cpu_alone(monkeypatch):
    monkeypatch.setitem(_native.load_errors, "_C", "not built")
    model = bf16_model()
    with pytest.raises(RuntimeError, match="the native kernels are not there: not built"):
        prepare(model)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert is_prepared(prepare(model))


@pytest.mark.parametrize("missing", [None, "rms_norm"])
def test_a_gpu_runs_the_kernels_that_it_has(missing, monkeypatch):
    """Decided by tensors that only say that they lie on one."""
    monkeypatch.setattr(fused_layer, "has_kernel", lambda name, device: device == "cuda" and name != missing)
    fused_layer._has_twins.cache_clear()
    model, x = prepare(bf16_model()), SimpleNamespace(dtype=torch.bfloat16, is_cpu=False, is_cuda=True)
    with torch.no_grad():
        usable = {type(f).__name__: f.is_usable(x) for m in model.modules() if (f := vars(m).get("forward"))}
    fused_layer._has_twins.cache_clear()
    assert usable == {"FusedStack": not missing, "FusedLayer": not missing, "PreparedLinear": True}
