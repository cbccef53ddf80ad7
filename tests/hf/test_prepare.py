"""Prepared models: the same results, from packed and merged weights, and nothing lost on the way back."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specdec_kernels.hf.families import FAMILIES
from specdec_kernels.hf.generate import generate
from specdec_kernels.hf.prepare import PreparedLinear, prepare, restore

from .half_precision import equal_bits
from .test_bits import DENSE, PARENTS, PATHS, one_by_one, prefilled, tree
from .test_generate import medusa
from .tiny import VOCAB, path_logits, tiny_model

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="torch has no oneDNN for bf16 on this machine",
)


def bf16_model(family="llama", **options):
    return tiny_model(family, **options).bfloat16()


def prepared_layers(model):
    return [module for module in model.modules() if isinstance(module, PreparedLinear)]


def groups(model):
    return {id(layer._group): layer._group for layer in prepared_layers(model)}.values()


def packed_bytes(model):
    """Bytes of all weights, packed or not."""
    parameters = {p.data_ptr(): p.nbytes for p in model.parameters()}
    packed = [group._packed for group in groups(model) if group._packed is not None]
    return sum(parameters.values()) + sum(weight.numel() * weight.element_size() for weight in packed)


def assert_same_state(state, expected):
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.fixture
def tokens():
    return torch.randint(3, VOCAB, (11,))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_the_models_own_up_to_rounding(family, tokens):
    model = bf16_model(family)
    exact = path_logits(copy.deepcopy(model).double(), tokens)
    plain = path_logits(model, tokens).double()
    prepared = path_logits(prepare(model), tokens).double()
    assert any(group._packed is not None for group in groups(model))
    ulp = 2.0**-7 * exact.abs().max()
    assert (prepared - exact).abs().max() <= 2 * (plain - exact).abs().max() + 4 * ulp


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
def test_state_stays_and_comes_back_bit_for_bit(family, tokens):
    model = bf16_model(family)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    names, tied = list(dict(model.named_parameters())), model.config.tie_word_embeddings
    prepare(model)
    path_logits(model, tokens)
    assert_same_state(model.state_dict(), expected)
    assert restore(model) is model
    assert not prepared_layers(model)
    assert_same_state(model.state_dict(), expected)
    assert list(dict(model.named_parameters())) == names
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
def test_no_second_copy_of_the_weights_stays(tied):
    model = bf16_model(tie_word_embeddings=tied)
    before = packed_bytes(model)
    attention = model.model.layers[0].self_attn
    weights = [weakref.ref(attention.q_proj.weight), weakref.ref(attention.o_proj.weight)]
    head = model.get_input_embeddings().weight.nbytes
    assert prepare(model) is model
    gc.collect()
    assert [weight() for weight in weights] == [None, None]
    assert packed_bytes(model) == before + (head if tied else 0)
    restore(model)
    assert packed_bytes(model) == before


def test_layers_that_share_an_input_are_one_product(tokens, monkeypatch):
    model = prepare(bf16_model())
    products = []
    multiply = type(next(iter(groups(model))))._multiply
    monkeypatch.setattr(
        "specdec_kernels.hf.prepare._Group._multiply",
        lambda group, x: products.append(group) or multiply(group, x),
    )
    path_logits(model, tokens)
    assert len(products) == 4 * model.config.num_hidden_layers + 1
    assert all(group._product is None for group in groups(model))


def test_columns_belong_to_the_input_they_were_made_for():
    attention = prepare(bf16_model()).model.layers[0].self_attn
    q, k, v = (layer.weight for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    x, y = torch.randn(2, 3, 64).bfloat16()
    with torch.no_grad():
        assert torch.equal(attention.k_proj(x), F.linear(x, k))
        assert torch.equal(attention.q_proj(y), F.linear(y, q))
        assert torch.equal(attention.v_proj(x), F.linear(x, v))
        x += 1
        assert torch.equal(attention.q_proj(x), F.linear(x, q))
        assert torch.equal(attention.q_proj(x), F.linear(x, q))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (1, 0), (0, 2), (5,), ()], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rows_do_not_depend_on_their_number(shape, family):
    layers = prepare(bf16_model(family)).model.layers[0].self_attn
    x = torch.randn(*shape, 64).bfloat16()
    many = torch.cat([x.reshape(-1, 64), torch.randn(7, 64).bfloat16()])
    with torch.inference_mode():
        for layer in (layers.q_proj, layers.o_proj):
            y = layer(x)
            assert y.shape == (*shape, 64)
            assert torch.equal(y.reshape(-1, 64), layer(many)[: x.numel() // 64])


def test_a_lone_row_is_never_multiplied_alone(monkeypatch):
    layer = prepare(bf16_model()).model.layers[0].mlp.down_proj
    multiply, rows = torch.ops.mkldnn._linear_pointwise, []
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda x, *more: rows.append(x.numel() // 48) or multiply(x, *more)
    )
    with torch.no_grad():
        for shape in ((48,), (1, 1, 48), (2, 1, 48)):
            assert layer(torch.ones(shape).bfloat16()).shape == (*shape[:-1], 64)
    assert rows == [2, 2, 2]


def test_before_and_after_casting_are_the_same(tokens):
    late = prepare(bf16_model())
    early = prepare(tiny_model())
    in_fp32 = path_logits(early, tokens)
    assert torch.equal(in_fp32, path_logits(tiny_model(), tokens))
    assert not any(group._packed is not None for group in groups(early))
    early.to(torch.bfloat16)
    assert torch.equal(path_logits(early, tokens), path_logits(late, tokens))
    assert all(group._packed is not None for group in groups(early))
    late.to(torch.float32)
    assert torch.equal(path_logits(late, tokens), path_logits(bf16_model().float(), tokens))


def test_preparing_and_restoring_twice_changes_nothing(tokens):
    model = bf16_model()
    plain = path_logits(model, tokens)
    layers = [id(group) for group in groups(prepare(model))]
    assert [id(group) for group in groups(prepare(model))] == layers
    assert torch.equal(path_logits(restore(restore(model)), tokens), plain)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
def test_other_weights_can_be_loaded(assign, tied, tokens):
    model, other = (bf16_model(tie_word_embeddings=tied) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    prepare(model)
    path_logits(model, tokens)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(path_logits(model, tokens), path_logits(prepare(other), tokens))


def test_a_weight_that_is_set_or_changed_is_used(tokens):
    model, other = prepare(bf16_model(tie_word_embeddings=True)), bf16_model(tie_word_embeddings=True)
    path_logits(model, tokens)
    for each in (model, other):
        with torch.no_grad():
            each.get_input_embeddings().weight.mul_(1.5)
        each.model.layers[1].self_attn.k_proj.weight = nn.Parameter(torch.ones(32, 64, dtype=torch.bfloat16))
    assert torch.equal(path_logits(model, tokens), path_logits(prepare(other), tokens))


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
    logits = path_logits(model, tokens)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    restore(model)
    assert not prepared_layers(model)
    assert torch.equal(path_logits(other, tokens), logits)
    assert_same_state(restore(other).state_dict(), model.state_dict())


def test_packed_in_inference_mode_can_be_restored_and_trained(tokens):
    model = prepare(bf16_model().float()).bfloat16()
    with torch.inference_mode():
        model(tokens[None])
    restore(model).train()(tokens[None], labels=tokens[None]).loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad is not None


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


def with_half_of_the_biases(model):
    model.model.layers[2].self_attn.k_proj.bias = nn.Parameter(torch.zeros(32))
    return model


REFUSED = {
    "no model": (lambda: nn.Linear(3, 3), TypeError, "must be a transformers.PreTrainedModel"),
    "training": (lambda: tiny_model().train(), RuntimeError, "training mode"),
    "device": (lambda: tiny_model().to("meta"), NotImplementedError, "on the CPU"),
    "layer": (lambda: with_other_layer(tiny_model()), NotImplementedError, r"layers.1.mlp.up_proj is a _Other"),
    "biases": (lambda: with_half_of_the_biases(tiny_model()), NotImplementedError, "some have a bias, some have none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_and_leaves_the_model_alone(case):
    make, error, message = REFUSED[case]
    model = make()
    with pytest.raises(error, match=message):
        prepare(model)
    assert not prepared_layers(model)


def test_refuses_a_machine_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no oneDNN"):
        prepare(bf16_model())


def test_a_prepared_model_refuses_gradients_training_and_other_dtypes(tokens):
    model = prepare(bf16_model())
    with pytest.raises(RuntimeError, match="no gradients"):
        model(tokens[None])
    with torch.no_grad(), pytest.raises(RuntimeError, match="no training"):
        model.train()(tokens[None])
    model.eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"must be torch.bfloat16, got torch.float32"):
        model.model.layers[0].self_attn.q_proj(torch.ones(2, 64))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"torch.compile"):
        torch.compile(model.model.layers[0].self_attn.o_proj, backend="eager", fullgraph=True)(
            torch.ones(2, 64).bfloat16()
        )
