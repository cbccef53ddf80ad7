"""The Kangaroo adapter: what it computes, its positions, and its files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_kernels.modules import KangarooAdapter
from specdec_kernels.modules.kangaroo import Rope
from specdec_kernels.ops.tree_attention import tree_attention
from specdec_kernels.tree import mask_from_parents

HIDDEN, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
ROPE = Rope(1e4 ** (-torch.arange(0, DIM, 2) / DIM))
KINDS = {"layer": 48, "attention": None}


def adapter(kind="layer", rope=ROPE, **options):
    torch.manual_seed(2)
    made = KangarooAdapter(HIDDEN, HEADS, KV_HEADS, 3, rope, intermediate_size=KINDS[kind], vocab_size=97, **options)
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return made.requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_llama_layer(kind):
    """With the same weights a decoder layer of transformers and its norm give the same states, positions included."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, rms_norm_eps=1e-5, vocab_size=97,
    )  # fmt: skip
    own, llama = adapter(kind), LlamaModel(config).eval()
    layer = llama.layers[0]
    for parameter in layer.parameters():
        parameter.data.zero_()
    for name, parameter in own.named_parameters():
        stem = name.removesuffix(".weight")
        holder = llama if stem == "norm" else layer
        for place in (holder, layer.self_attn, layer.mlp):
            if hasattr(place, stem):
                getattr(place, stem).weight.data.copy_(parameter)
    if kind == "attention":
        layer.post_attention_layernorm.weight.data.fill_(1)
    hidden = torch.randn(2, 9, HIDDEN)
    torch.testing.assert_close(own(hidden), llama(inputs_embeds=hidden).last_hidden_state)


def test_positions_turn_a_part_of_the_head():
    """Partial rotation: the last dimensions stay; a scale multiplies what turns."""
    own = adapter(rope=Rope(torch.tensor([0.5, 0.1]), scale=2.0))
    hidden = torch.randn(1, 5, HIDDEN)
    _, keys, _ = own.attention_inputs(hidden, torch.tensor([[0, 1, 2, 3, 40]]))
    _, at_zero, _ = own.attention_inputs(hidden, torch.zeros(1, 5))
    torch.testing.assert_close(keys[..., 4:], at_zero[..., 4:])
    angle = torch.tensor(40 * 0.1)
    first, second = at_zero[0, 4, :, 1], at_zero[0, 4, :, 3]
    torch.testing.assert_close(keys[0, 4, :, 1], first * angle.cos() - second * angle.sin())
    plain = adapter(rope=Rope(torch.tensor([0.5, 0.1]))).attention_inputs(hidden, torch.zeros(1, 5))[1]
    torch.testing.assert_close(at_zero[..., :4], 2 * plain[..., :4])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", [ROPE, Rope(torch.tensor([0.5, 0.1]), scale=2.0)], ids=["whole", "partial"])
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_behind_their_prefixes_give_what_whole_sequences_give(kind, rope, cache_dtype):
    """Prompts of two lengths, then the rest of each text at once: keys, values and states are those of `forward`.

    A narrower cache holds the same keys and values rounded; what they then give is another thing.
    """
    own, hidden, lengths = adapter(kind, rope), torch.randn(2, 9, HIDDEN), [6, 4]
    keys, values = (torch.full((2, 12, KV_HEADS, DIM), torch.nan, dtype=cache_dtype) for _ in range(2))
    prefix_len = torch.tensor(lengths, dtype=torch.int32)
    own.cache_nodes(hidden[:, :6], torch.arange(6)[None], keys, values, torch.zeros_like(prefix_len))
    nodes = torch.stack([row[n : n + 3] for row, n in zip(hidden, lengths, strict=True)])
    queries = own.cache_nodes(nodes, prefix_len[:, None] + torch.arange(3), keys, values, prefix_len)
    chain = mask_from_parents(torch.tensor([[-1, 0, 1]]))
    wide_keys, wide_values = keys.float().nan_to_num(0), values.float().nan_to_num(0)
    attended, _ = tree_attention(queries, wide_keys, wide_values, chain, prefix_len)
    states, whole = own.states(nodes, attended), own(hidden)
    _, *expected = own.attention_inputs(hidden, torch.arange(9)[None])
    for row, n in enumerate(lengths):
        if cache_dtype == torch.float32:
            torch.testing.assert_close(states[row], whole[row, n : n + 3], atol=1e-5, rtol=1e-4)
        for cache, rows in zip((wide_keys, wide_values), expected, strict=True):
            torch.testing.assert_close(cache[row, : n + 3], rows[row, : n + 3].to(cache_dtype).float())


def test_rows_see_only_what_came_before():
    own, hidden = adapter(), torch.randn(1, 7, HIDDEN)
    changed = hidden.clone()
    changed[:, 5:] = 0
    torch.testing.assert_close(own(changed)[:, :5], own(hidden)[:, :5])
    assert not torch.allclose(own(changed)[:, 5:], own(hidden)[:, 5:])


def test_starts_from_a_layer_as_far_as_shapes_agree():
    source = adapter("layer")
    layer = torch.nn.ModuleDict({name: module for name, module in source.named_children() if name != "norm"})
    layer["down_proj"] = torch.nn.Linear(7, HIDDEN)
    fresh = KangarooAdapter(HIDDEN, HEADS, KV_HEADS, 3, ROPE, intermediate_size=48)
    before = fresh.down_proj.weight.clone()
    fresh.start_from(layer, source.norm)
    for name in ("q_proj", "o_proj", "gate_proj", "input_layernorm", "norm"):
        assert torch.equal(getattr(fresh, name).weight, getattr(source, name).weight)
    assert torch.equal(fresh.down_proj.weight, before)


@pytest.mark.parametrize("kind", KINDS)
def test_saves_and_loads(tmp_path, kind):
    own = adapter(kind, vocab_map=torch.tensor([1, 5, 9]), dtype=torch.bfloat16)
    own.metadata = {"base_model_name_or_path": "some/model"}
    own.save_pretrained(tmp_path / "new")
    loaded = KangarooAdapter.from_pretrained(tmp_path / "new", ROPE)
    assert {n: tuple(p.shape) for n, p in loaded.named_parameters()} == {
        n: tuple(p.shape) for n, p in own.named_parameters()
    }
    assert loaded.q_proj.weight.dtype == torch.bfloat16
    hidden = torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(loaded(hidden), own(hidden))
    assert (loaded.exit_layer, loaded.vocab_size, loaded.metadata) == (3, 97, own.metadata)
    assert torch.equal(loaded.vocab_map, own.vocab_map)
    weight = torch.randn(97, HIDDEN)
    assert torch.equal(loaded.select_rows(weight), weight[[1, 5, 9]])
    again = KangarooAdapter.from_pretrained(tmp_path / "new", ROPE, exit_layer=2, dtype=torch.float32)
    assert (again.exit_layer, again.q_proj.weight.dtype) == (2, torch.float32)


def public_folder(folder, own):
    """Write an adapter as the paper's code publishes them: a Llama configuration, a pickle, an old buffer."""
    own.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(weights, folder / "pytorch_model.bin")
    config = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 999, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5, "vocab_size": 97}))


def test_loads_the_public_files(tmp_path):
    own = adapter("attention")
    public_folder(tmp_path, own)
    loaded = KangarooAdapter.from_pretrained(tmp_path, ROPE, exit_layer=3)
    assert loaded.intermediate_size is None
    hidden = torch.randn(1, 4, HIDDEN)
    assert torch.equal(loaded(hidden), own(hidden))
    with pytest.raises(ValueError, match="names no exit_layer"):
        KangarooAdapter.from_pretrained(tmp_path, ROPE)


def without(name):
    return lambda weights: weights.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("norm.weight"), r"missing keys \['norm.weight'\], unexpected keys \[\]"),
        (without("layers.0.mlp.up_proj.weight"), r"missing keys \['layers.0.mlp.up_proj.weight'\]"),
        (lambda w: w.update({"layers.1.x": torch.ones(1)}), r"unexpected keys \['layers.1.x'\]"),
        (lambda w: w.update({"layers.0.self_attn.o_proj.weight": torch.ones(32, 30)}), r"shape \(32, 32\), got"),
        (lambda w: w.update({"layers.0.self_attn.k_proj.weight": torch.ones(8, 32)}), "num_key_value_heads = 2, but"),
    ],
    ids=["norm", "mlp", "second layer", "shape", "heads"],
)
def test_rejects(tmp_path, change, message):
    adapter().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        KangarooAdapter.from_pretrained(tmp_path, ROPE)


def test_a_folder_without_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold config.json and model.safetensors or pytorch_model.bin"):
        KangarooAdapter.from_pretrained(tmp_path, ROPE)
