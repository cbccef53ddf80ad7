"""Every supported family gives its own logits along chains, trees and ragged batches; the others are refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from specdec_kernels.hf import _chunks
from specdec_kernels.hf.families import FAMILIES, check_supported
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.testing import assert_close_to_baseline
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents
from tests.hf.tiny import OPTIONS, VOCAB, path_logits, tiny_model

PARENTS = [-1, 0, 0, 1, 1, 2]
PATHS = [[0, 1, 3], [0, 1, 4], [0, 2, 5]]
LENGTHS = [5, 1, 11]  # below a window, one token, and past a window and a prefill chunk


class Models:
    """A model in fp32, the same one in fp64, and what both say about one longer sequence."""

    def __init__(self, model_type, **options):
        self.model = tiny_model(model_type, **options)
        self.exact = tiny_model(model_type, **options).double()
        ids = torch.randint(3, VOCAB, (24,))
        self.sample = path_logits(self.model, ids), path_logits(self.exact, ids)


@pytest.fixture(params=sorted(FAMILIES))
def models(request):
    return Models(request.param)


def tree(parents):
    mask = mask_from_parents(torch.tensor([parents], dtype=torch.int32))
    return mask, depths_from_mask(mask)


def assert_same_logits(actual, models, *tokens):
    """Compare with the last logits of a sequence as the model itself computes them.

    The error allowed is twice that of the model in fp32 over these logits and the sample: of a few it would be luck.
    """
    baseline, exact = (path_logits(model, *tokens)[-len(actual) :] for model in (models.model, models.exact))
    sample, exact_sample = models.sample
    assert_close_to_baseline(
        torch.cat([sample, actual]), torch.cat([exact_sample, exact]), torch.cat([sample, baseline])
    )


def test_every_supported_family_is_tested():
    assert set(OPTIONS) == set(FAMILIES)


WINDOWED = ["gemma2", "gemma3_text", "gpt_oss", "mistral", "mixtral", "phi3", "qwen2", "starcoder2"]
PECULIARITIES = [(name, {"sliding_window": 1000}) for name in WINDOWED] + [
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 24}),
    ("granite", {"attention_multiplier": 0.25}),
    ("granite", {"logits_scaling": 1.0}),
]


@pytest.mark.parametrize(
    ("model_type", "without"), PECULIARITIES, ids=lambda v: v if isinstance(v, str) else next(iter(v))
)
def test_peculiarity_shows_in_the_tiny_model(model_type, without):
    """Otherwise the tests below would pass without it."""
    ids = torch.randint(3, VOCAB, (max(LENGTHS),))
    with_it = path_logits(tiny_model(model_type), ids)
    assert (path_logits(tiny_model(model_type, **without), ids) - with_it).abs().max() > 0.01


def test_sinks_show_in_the_tiny_model():
    ids = torch.randint(3, VOCAB, (max(LENGTHS),))
    model = tiny_model("gpt_oss")
    with_sinks = path_logits(model, ids)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    assert (path_logits(model, ids) - with_sinks).abs().max() > 0.01


def test_chain_equals_the_model(models):
    ids = torch.randint(3, VOCAB, (1, 13))
    target = HFTarget(models.model, batch_size=1, capacity=16)
    output = target.prefill(ids[:, :9], torch.tensor([9], dtype=torch.int32))
    assert_same_logits(output.logits[0], models, ids[0, :9])
    output = target.forward(ids[:, 9:], *tree([-1, 0, 1, 2]))
    assert_same_logits(output.logits[0], models, ids[0])


def test_ragged_trees_equal_their_paths(models, monkeypatch):
    """Case 63 and 80: prompts of different lengths, and rows that accept different paths, then the next step."""
    monkeypatch.setattr(_chunks, "PREFILL_CHUNK", 4)
    prompts = torch.randint(3, VOCAB, (3, max(LENGTHS)))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    target = HFTarget(models.model, batch_size=3, capacity=20)
    output = target.prefill(prompts, lengths)
    rows = [prompts[b, :length] for b, length in enumerate(LENGTHS)]
    for b, row in enumerate(rows):
        assert_same_logits(output.logits[b], models, row)

    nodes = torch.randint(3, VOCAB, (3, len(PARENTS)))
    output = target.forward(nodes, *tree(PARENTS))
    for b, row in enumerate(rows):
        for path in PATHS:
            assert_same_logits(output.logits[b, path], models, row, nodes[b, path])

    accepted = torch.tensor([[2, 5], [-1, -1], [1, -1]], dtype=torch.int32)
    count = torch.tensor([2, 0, 1], dtype=torch.int32)
    target.commit(accepted, count, torch.tensor([True, True, True]))
    assert target.prefix_len.tolist() == [8, 2, 13]
    rows = [
        torch.cat([row, nodes[b, path]])
        for b, (row, path) in enumerate(zip(rows, [[0, 2, 5], [0], [0, 1]], strict=True))
    ]
    nodes = torch.randint(3, VOCAB, (3, len(PARENTS)))
    output = target.forward(nodes, *tree(PARENTS))
    for b, row in enumerate(rows):
        for path in PATHS:
            assert_same_logits(output.logits[b, path], models, row, nodes[b, path])


def test_one_key_value_head():
    models = Models("llama", num_key_value_heads=1)
    ids = torch.randint(3, VOCAB, (1, 6))
    target = HFTarget(models.model, batch_size=1, capacity=8)
    output = target.prefill(ids, torch.tensor([6], dtype=torch.int32))
    assert_same_logits(output.logits[0], models, ids[0])


def build(model_type, auto_class=AutoModelForCausalLM, **options):
    return auto_class.from_config(AutoConfig.for_model(model_type, **options))


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
GPT2 = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 50}
REFUSED = {
    "linear-attention": (
        lambda: build("qwen3_next", **SMALL, num_experts=2, layer_types=["linear_attention", "full_attention"]),
        "layers of type 'linear_attention' .layer 0 of qwen3_next",
    ),
    "encoder-decoder": (
        lambda: build("t5", AutoModel, d_model=32, d_ff=32, num_layers=1, vocab_size=50),
        "encoder-decoder models.*t5 has is_encoder_decoder=True",
    ),
    "mla": (
        lambda: build("deepseek_v3", **SMALL, first_k_dense_replace=2),
        "latent attention .MLA.*deepseek_v3 has kv_lora_rank=512",
    ),
    "chunked": (
        lambda: build(
            "llama4_text", **SMALL, intermediate_size_mlp=32, num_local_experts=1, head_dim=16, pad_token_id=0
        ),
        "chunked attention; llama4_text has attention_chunk_size=8192",
    ),
    "shared-kv": (
        lambda: build("llama", **SMALL, num_kv_shared_layers=1),
        "layers that share the K and V of another layer; llama has num_kv_shared_layers=1",
    ),
    "cross-attention": (lambda: build("gpt2", **GPT2, add_cross_attention=True), "cross-attention layers"),
    "unknown-family": (lambda: build("gpt2", **GPT2), "model type 'gpt2' .supported: gemma, gemma2"),
    "ssm": (lambda: build("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=50), "mamba"),
    "no-projection": (lambda: build("llama", AutoModel, **SMALL), "LlamaModel, which has no vocabulary projection"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_and_says_what(case):
    """Case 78 and 79: a state that cannot be rolled back must not be rolled back silently."""
    make, message = REFUSED[case]
    with pytest.raises(NotImplementedError, match=f"speculative decoding does not support .*{message}"):
        check_supported(make())


def test_refuses_other_objects():
    with pytest.raises(TypeError, match=r"must be a transformers.PreTrainedModel, got Linear"):
        check_supported(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_refuses_to_cross_the_length_where_rope_changes(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope.update(short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=32)
    model = build("llama", **SMALL, max_position_embeddings=32, rope_parameters=rope)
    check_supported(model, capacity=32)
    with pytest.raises(NotImplementedError, match=f"'{kind}' RoPE past its original length 32.*capacity of 33"):
        HFTarget(model, batch_size=1, capacity=33)
