"""`speculative_generate` gives, token for token, what `model.generate` gives."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from specdec_kernels.decoding import DecodeStats
from specdec_kernels.decoding.drafters import MedusaDrafter
from specdec_kernels.hf.generate import generate, speculative_generate
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.tree import DraftTree

from ..decoding.toy import CheatingDrafter
from .tiny import VOCAB, tiny_model

TREE = DraftTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]])
PROMPTS = [[5, 9, 40, 3, 77], [8], [30, 31, 32, 33, 34, 35, 36, 37, 38], [60, 2, 61]]
NEW = 14


@pytest.fixture(scope="module")
def model():
    # Weights large enough that the text depends on all of the context and does not repeat.
    model = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2)
    model.generation_config.eos_token_id = None
    return model


def inputs_of(prompts):
    """Left-pad with token 0, as a tokenizer would."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


BATCHES = {"B1": inputs_of(PROMPTS[:1]), "B4": inputs_of(PROMPTS)}


def medusa(model, *, tree=TREE, root_conditioned=False):
    generator = torch.Generator().manual_seed(0)
    heads = MedusaHeads(3, 1, model.config.hidden_size, VOCAB, root_conditioned=root_conditioned)
    for parameter in heads.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    weight = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight if root_conditioned else None
    return MedusaDrafter(heads.to(weight.dtype), tree, weight, embedding)


def oracle(inputs, plain, tree=TREE):
    width = inputs["input_ids"].shape[1]
    return CheatingDrafter(tree, [row[width:].tolist() + [1] * 4 for row in plain], VOCAB)


def drafters(model, inputs, plain):
    return {"medusa": medusa(model), "oracle": oracle(inputs, plain)}


def check(model, inputs, **options):
    """Compare with `model.generate` under both drafters; return its output and the oracle's stats."""
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    plain = model.generate(**inputs, **options)
    stats = DecodeStats()
    for name, drafter in drafters(model, inputs, plain).items():
        options["stats"] = stats if name == "oracle" else None
        ours = model.generate(**inputs, custom_generate=speculative_generate, drafter=drafter, **options)
        assert torch.equal(ours, plain), name
    return plain, stats


@pytest.mark.parametrize("batch", BATCHES)
def test_greedy(model, batch):
    plain, stats = check(model, BATCHES[batch])
    assert plain.shape[1] == BATCHES[batch]["input_ids"].shape[1] + NEW
    assert stats.mean_accepted >= 2.5


def test_the_texts_are_worth_comparing(model):
    plain = model.generate(**BATCHES["B4"], max_new_tokens=NEW, do_sample=False)[:, -NEW:]
    assert len({tuple(row) for row in plain.tolist()}) == 4
    assert min(len(set(row)) for row in plain.tolist()) > 4


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "qwen3"])
def test_families(family):
    """Windows shorter than the text, soft caps, sinks: what the target's tests check once, at every step."""
    model = tiny_model(family, num_hidden_layers=3)
    model.generation_config.eos_token_id = None
    check(model, BATCHES["B4"])


@pytest.mark.parametrize("mask", ["none", "ones"])
def test_prompts_without_padding(model, mask):
    ids = torch.tensor([PROMPTS[0], [1, 2, 3, 4, 5]])
    check(model, {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if mask == "ones" else {}))


def only_even(batch_id, sent):
    """Allow tokens of the parity of batch row and length: wrong contexts show."""
    return list(range((batch_id + len(sent)) % 2, VOCAB, 2))


class ForbidTheSum:
    """Forbid one token that depends on the whole row, its padding included."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, (input_ids.sum(1, keepdim=True) * 7 + input_ids.shape[1]) % VOCAB, -torch.inf)


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[26], [45], [6, 22], [72, 12]]},
    "suppress_tokens": {"suppress_tokens": list(range(0, VOCAB, 3))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, VOCAB, 2))},
    "sequence_bias": {"sequence_bias": [[[11], 2.0], [[12], 3.0], [[12, 13], 9.0]]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 6.0},
    "forced_eos_token_id": {"forced_eos_token_id": 50},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True, "repetition_penalty": 4.0},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_even},
    "custom": {"logits_processor": LogitsProcessorList([ForbidTheSum()])},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [37, 7, 45],
        "bad_words_ids": [[9]],
    },
}


@pytest.mark.parametrize(
    ("name", "batch"), [("several", "B1"), ("custom", "B1"), *((name, "B4") for name in PROCESSORS)]
)
def test_logits_processors(model, name, batch):
    plain, stats = check(model, BATCHES[batch], **PROCESSORS[name])
    bare = model.generate(**BATCHES[batch], max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(plain, bare), "the processor changes nothing here"
    assert stats.mean_accepted > 2


def eos_of(model, batch, *positions):
    """Choose ids that plain decoding emits for the first time at these positions of the first row."""
    bare = model.generate(**BATCHES[batch], max_new_tokens=NEW, do_sample=False)
    return [int(bare[0, BATCHES[batch]["input_ids"].shape[1] + position]) for position in positions]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("positions", [(0,), (4,), (8, 5)])
@pytest.mark.parametrize("pad", [0, None])
def test_eos(model, batch, positions, pad):
    eos = eos_of(model, batch, *positions)
    plain, _ = check(model, BATCHES[batch], eos_token_id=eos if len(eos) > 1 else eos[0], pad_token_id=pad)
    assert int(plain[0, BATCHES[batch]["input_ids"].shape[1] :][min(positions)]) in eos


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 6},
        {"min_length": 12},
        {"exponential_decay_length_penalty": (2, 1.7)},
        {"max_length": 16, "max_new_tokens": None},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
    ],
    ids=str,
)
def test_lengths(model, batch, options):
    check(model, BATCHES[batch], eos_token_id=eos_of(model, batch, 3, 6), pad_token_id=0, **options)


class StopWhenRowZeroSays(StoppingCriteria):
    """End the whole batch by its first row, and remember every call: order, shapes and padding must be right."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        return len(self.calls) == 9


class StopRows(StoppingCriteria):
    """End each row by itself: when its last two tokens have an odd sum the third time."""

    def __init__(self):
        self.odd = None

    def __call__(self, input_ids, scores, **kwargs):
        odd = input_ids[:, -2:].sum(1) % 2
        self.odd = odd if self.odd is None else self.odd + odd
        return self.odd >= 3


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("has_eos", [False, True])
@pytest.mark.parametrize("make", [StopWhenRowZeroSays, StopRows])
def test_stopping_criteria_with_a_state_see_what_they_would_see(model, batch, has_eos, make):
    inputs = BATCHES[batch]
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    if has_eos:
        options["eos_token_id"] = eos_of(model, batch, 11)
    outputs, criteria, stats = [], [], DecodeStats()
    for drafter in (None, medusa(model), oracle(inputs, model.generate(**inputs, **options))):
        ours = {} if drafter is None else {"custom_generate": speculative_generate, "drafter": drafter, "stats": stats}
        criteria.append(make())
        outputs.append(
            model.generate(**inputs, **options, **ours, stopping_criteria=StoppingCriteriaList([criteria[-1]]))
        )
    assert outputs[0].shape[1] < inputs["input_ids"].shape[1] + NEW or make is StopRows
    if batch == "B1":
        assert stats.num_tokens == sum(output.shape[1] - inputs["input_ids"].shape[1] for output in outputs[1:])
    for output, criterion in zip(outputs[1:], criteria[1:], strict=True):
        assert torch.equal(output, outputs[0])
        if make is StopWhenRowZeroSays:
            assert criterion.calls == criteria[0].calls


def test_max_time(model):
    inputs = BATCHES["B4"]
    criteria = StoppingCriteriaList([MaxTimeCriteria(max_time=1.0, initial_timestamp=0.0)])
    out = generate(model, **inputs, drafter=medusa(model), max_new_tokens=NEW, stopping_criteria=criteria)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 1


class Recorder(BaseStreamer):
    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value.tolist())

    def end(self):
        self.parts.append("end")


@pytest.mark.parametrize("batch", BATCHES)
def test_streamers_get_the_same(model, batch):
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": eos_of(model, batch, 8),
        "pad_token_id": 0,
        "stopping_criteria": StoppingCriteriaList([StopRows()]),
    }
    plain, ours, wrapped = Recorder(), Recorder(), Recorder()
    model.generate(**BATCHES[batch], streamer=plain, **options)
    options["stopping_criteria"] = StoppingCriteriaList([StopRows()])
    model.generate(
        **BATCHES[batch],
        custom_generate=speculative_generate,
        drafter=medusa(model),
        token_streamer=ours,
        **options,
    )
    options["stopping_criteria"] = StoppingCriteriaList([StopRows()])
    generate(model, **BATCHES[batch], drafter=medusa(model), streamer=wrapped, **options)
    assert plain.parts == ours.parts == wrapped.parts
    assert len(plain.parts) > 4


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("processed", [False, True])
def test_return_dict_scores_and_logits(model, batch, processed):
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "eos_token_id": eos_of(model, batch, 9),
        "pad_token_id": 0,
    } | ({"repetition_penalty": 1.3} if processed else {})
    plain = model.generate(**BATCHES[batch], **options)
    width = BATCHES[batch]["input_ids"].shape[1]
    for drafter in (medusa(model), oracle(BATCHES[batch], plain.sequences)):
        ours = generate(model, **BATCHES[batch], drafter=drafter, **options)
        assert type(ours) is type(plain)
        assert torch.equal(ours.sequences, plain.sequences)
        assert len(ours.scores) == len(ours.logits) == len(plain.scores)
        ended = torch.zeros(len(ours.sequences), dtype=torch.bool)
        for n, (scores, logits) in enumerate(zip(ours.scores, ours.logits, strict=True)):
            torch.testing.assert_close(scores[~ended], plain.scores[n][~ended], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(logits[~ended], plain.logits[n][~ended], atol=1e-4, rtol=1e-4)
            assert (scores[ended].argmax(1) == 0).all()
            ended |= torch.isin(ours.sequences[:, width + n], torch.tensor(options["eos_token_id"]))
        transitions = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
        assert torch.isfinite(transitions).all()


def test_return_dict_without_scores(model):
    ours = generate(model, **BATCHES["B1"], drafter=medusa(model), max_new_tokens=3, return_dict_in_generate=True)
    assert ours.scores is None
    assert ours.logits is None
    assert ours.sequences.shape == (1, 8)


def test_stop_strings(model):
    tokenizer = tiny_tokenizer()
    inputs = inputs_of(PROMPTS)
    bare = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    word = tokenizer.decode(bare[0, -9:-7])
    options = {"max_new_tokens": NEW, "do_sample": False, "stop_strings": [word, "never"], "tokenizer": tokenizer}
    options |= {"eos_token_id": 96, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    assert not torch.equal(plain, bare)
    for drafter in (medusa(model), oracle(inputs, bare)):
        assert torch.equal(generate(model, **inputs, drafter=drafter, **options), plain)
    config = GenerationConfig(max_new_tokens=NEW, stop_strings=word, eos_token_id=96, pad_token_id=0)
    ours = generate(model, **inputs, drafter=medusa(model), generation_config=config, tokenizer=tokenizer)
    assert torch.equal(ours, plain)
    assert config.stop_strings == word
    with pytest.raises(ValueError, match="tokenizer"):
        generate(model, **inputs, drafter=medusa(model), generation_config=config)


def tiny_tokenizer():
    """Return a tokenizer whose tokens are single characters."""
    vocab = {chr(33 + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
