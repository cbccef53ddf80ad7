"""Every drafter behind `generate`: the tokens of `model.generate` in fp32, the bits of plain decoding in bf16."""

from functools import partial

import pytest
import torch

from specdec_kernels.decoding import DecodeStats, DynamicTree
from specdec_kernels.decoding.drafters import (
    DraftModelDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    MergedDrafter,
    NGramDrafter,
)
from specdec_kernels.decoding.exits import ExitRule
from specdec_kernels.hf.generate import generate, speculative_generate
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.tree import DraftTree
from tests.decoding.test_loop_law import LIMIT

from .half_precision import equal_bits
from .self_drafting import LAW_VOCAB, excess, law_model
from .test_generate import BATCHES, NEW, PROMPTS, eos_of, inputs_of, medusa
from .test_kangaroo import TREE, drafts_of, hopping
from .tiny import VOCAB, tiny_model

ALWAYS = ExitRule(threshold=0.0, target_rate=None)


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2)
    model.generation_config.eos_token_id = None
    return model


def disturbed(model, noise=0.004):
    """Return a model that mostly says what the other says."""
    twin = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2).to(model.dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return twin


def draft_model(model, **options):
    return DraftModelDrafter(partial(HFTarget, disturbed(model)), max_drafts=4, **options)


def kangaroo(model, tree=None):
    drafter = hopping(model, 1, tree=tree, noise=0.02, exit_rule=ExitRule(threshold=0.3))
    drafter.adapter.to(model.dtype)
    return drafter


def layer_skip(model):
    return LayerSkipDrafter([1], [0], max_drafts=4, exit_rule=ExitRule(threshold=0.2))


def with_ngrams(drafter):
    return MergedDrafter(drafter, NGramDrafter(max_ngram=1, num_branches=2, max_drafts=4))


DRAFTERS = {
    "draft model": draft_model,
    "draft model, adaptive": lambda model: DraftModelDrafter(partial(HFTarget, disturbed(model)), max_drafts=6),
    "ngram": lambda model: NGramDrafter(max_drafts=5),
    "ngram tree": lambda model: NGramDrafter(max_drafts=3, num_branches=3),
    "medusa, root-conditioned": partial(medusa, root_conditioned=True),
    "medusa, dynamic": partial(medusa, tree=DynamicTree(9, 4), root_conditioned=True),
    "medusa, likely nodes": partial(medusa, tree=DynamicTree(9, 4, 0.02)),
    "medusa + ngram": lambda model: MergedDrafter(medusa(model), NGramDrafter(num_branches=2), max_nodes=20),
    "medusa, dynamic + ngram": lambda model: MergedDrafter(
        medusa(model, tree=DynamicTree(9, 4, 0.02)), NGramDrafter(num_branches=2), max_nodes=20
    ),
    "draft model + ngram": lambda model: MergedDrafter(draft_model(model), NGramDrafter()),
    "kangaroo": kangaroo,
    "kangaroo tree": partial(kangaroo, tree=TREE),
    "layer skip": layer_skip,
    "kangaroo + ngram": lambda model: with_ngrams(kangaroo(model)),
    "kangaroo tree + ngram": lambda model: with_ngrams(kangaroo(model, TREE)),
    "layer skip + ngram": lambda model: with_ngrams(layer_skip(model)),
}
# Prompts that repeat themselves, so that something is found.
REPETITIVE = inputs_of([[5, 9, 40, 5, 9], [8, 8], [30, 31, 32, 30, 31, 40, 30, 31], [60, 2, 61]])


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("batch", ["B1", "B4", "repetitive"])
def test_greedy_texts_are_those_of_generate(model, name, batch):
    inputs = REPETITIVE if batch == "repetitive" else BATCHES[batch]
    stats = DecodeStats()
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = model.generate(**inputs, **options)
    ours = generate(model, **inputs, drafter=DRAFTERS[name](model), stats=stats, **options)
    assert torch.equal(ours, plain)
    if name.startswith("draft model"):
        assert stats.mean_accepted > 1


@equal_bits
@pytest.mark.parametrize("name", DRAFTERS)
def test_bf16_has_the_bits_of_plain_decoding(name):
    model = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2).bfloat16()
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for inputs in (inputs_of([[5, 9, 40, 5, 9]]), REPETITIVE):
        plain = generate(model, **inputs, drafter=None, **options)
        ours = generate(model, **inputs, drafter=DRAFTERS[name](model), **options)
        assert torch.equal(ours.sequences, plain.sequences)
        assert torch.equal(torch.stack(ours.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("name", DRAFTERS)
def test_eos_and_processors(model, name):
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": eos_of(model, "B4", 5, 8),
        "pad_token_id": 0,
        "repetition_penalty": 1.3,
    }
    plain = model.generate(**BATCHES["B4"], **options)
    assert torch.equal(generate(model, **BATCHES["B4"], drafter=DRAFTERS[name](model), **options), plain)


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_rows_repeat_by_seed_in_any_batch(model, name):
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.2, "top_k": 20}
    seeds = [3, 4, 5, 6]
    together = generate(model, **inputs_of(PROMPTS), drafter=DRAFTERS[name](model), seed=seeds, **options)
    for row, prompt in enumerate(PROMPTS):
        drafter = DRAFTERS[name](model)
        alone = generate(model, **inputs_of([prompt]), drafter=drafter, seed=[seeds[row]], **options)
        assert torch.equal(alone[0, -NEW:], together[row, -NEW:])
    assert len({tuple(row[-NEW:]) for row in together.tolist()}) == 4


def test_filters_reach_the_draft_model(model):
    """With top_k 1 sampling is greedy; a draft model that is not told so is refused again and again."""
    options = {"max_new_tokens": 25, "do_sample": True, "top_k": 1}
    plain, stats = model.generate(**BATCHES["B4"], **options), DecodeStats()
    drafter = DraftModelDrafter(partial(HFTarget, model), max_drafts=3, exit_rule=ALWAYS)
    ours = generate(model, **BATCHES["B4"], drafter=drafter, stats=stats, seed=1, **options)
    assert torch.equal(ours, plain)
    assert stats.mean_accepted == 3


def test_a_model_may_be_given_as_the_drafter(model):
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = model.generate(**BATCHES["B4"], **options)
    for ours in (
        model.generate(**BATCHES["B4"], custom_generate=speculative_generate, drafter=disturbed(model), **options),
        model.generate(**BATCHES["B4"], custom_generate=speculative_generate, drafter=None, **options),
    ):
        assert torch.equal(ours, plain)


def test_a_draft_model_of_an_unsupported_kind_is_refused(model):
    other = disturbed(model)
    other.config.is_encoder_decoder = True
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        generate(model, **BATCHES["B1"], drafter=other, max_new_tokens=2)


def test_padded_vocabulary_of_a_draft_model(model):
    wider = tiny_model("llama", initializer_range=0.5, num_hidden_layers=1, vocab_size=VOCAB + 31)
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 30}
    sampled = generate(model, **BATCHES["B4"], drafter=wider, seed=1, **options)
    assert int(sampled.max()) < VOCAB
    options["do_sample"] = False
    plain = model.generate(**BATCHES["B4"], max_new_tokens=NEW, do_sample=False)
    assert torch.equal(generate(model, **BATCHES["B4"], drafter=wider, max_new_tokens=NEW, do_sample=False), plain)


@pytest.mark.parametrize(
    "tree",
    [DraftTree.from_choices([[0], [1], [0, 0]]), DynamicTree(6, 3), DynamicTree(6, 3, 0.1)],
    ids=["fixed", "dynamic", "likely nodes"],
)
def test_sampled_text_with_root_conditioned_heads_has_the_targets_law(tree):
    """The joint law of the first three tokens against its enumeration; trees depend on what was emitted before."""
    model = law_model()
    heads = MedusaHeads(2, 1, 16, LAW_VOCAB, own_projection=True, root_conditioned=True)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    drafter = MedusaDrafter(heads, tree, embedding_weight=model.get_input_embeddings().weight)
    drafts = drafts_of(drafter)
    assert excess(model, drafter, 0.8) < LIMIT
    if getattr(tree, "min_prob", 0):
        assert len(set(drafts[0].num_nodes.tolist())) > 1, "rows of one step differ"
