"""Sampling through `speculative_generate`: the law, the warpers, the seeds."""

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec_kernels.decoding import DecodeStats, RejectionAcceptance, TypicalAcceptance
from specdec_kernels.decoding.drafters import MedusaDrafter
from specdec_kernels.hf.generate import speculative_generate
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.tree import DraftTree

from ..decoding.toy import chi_square_excess
from .tiny import tiny_model

VOCAB = 6
# Every token is drafted at depth 1, so that one of them is always accepted; two at depth 2.
TREE = DraftTree.from_choices([[i] for i in range(VOCAB)] + [[i, j] for i in range(VOCAB) for j in range(2)])
NUM_ROWS = 3000
# A right sampler exceeds it once in 300,000 seeds, and the seed is fixed.
LIMIT = 4.5


@pytest.fixture(scope="module")
def model():
    model = tiny_model(
        "llama", vocab_size=VOCAB, initializer_range=0.3, num_hidden_layers=2, hidden_size=16, intermediate_size=16,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model.generation_config.eos_token_id = None
    model.generation_config.top_k = 0
    return model


@pytest.fixture(scope="module")
def drafter(model):
    generator = torch.Generator().manual_seed(0)
    heads = MedusaHeads(2, 1, 16, VOCAB, own_projection=True)
    heads.w_out.data.copy_(torch.randn(heads.w_out.shape, generator=generator))
    return MedusaDrafter(heads, TREE)


def sample(model, drafter, ids, **options):
    return model.generate(ids, custom_generate=speculative_generate, drafter=drafter, do_sample=True, **options)


WARPERS = {
    "nothing": ({}, []),
    "temperature": ({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)]),
    "top_k": ({"top_k": 3}, [TopKLogitsWarper(3)]),
    "top_p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    "min_p": ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
    "all": (
        {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(4), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
    ),
}


def law_of(model, prompt, warpers):
    """Return the probability of each continuation of three tokens, ``(V, V, V)``, from the model alone."""
    grid = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(len(grid), -1), grid], dim=1)).logits[:, prompt.shape[1] - 1 : -1]
    flat = logits.flatten(0, 1)
    for warper in warpers:
        flat = warper(None, flat)
    probs = flat.softmax(-1).double().view(len(grid), 3, VOCAB)
    return probs.gather(2, grid[:, :, None]).prod(1).view(VOCAB, VOCAB, VOCAB)


def counts_of(tokens):
    return torch.zeros(VOCAB, VOCAB, VOCAB).index_put_(tuple(tokens.T), torch.tensor(1.0), accumulate=True)


@pytest.mark.parametrize("name", WARPERS)
def test_the_first_three_tokens_have_the_joint_law_of_generate(model, drafter, name):
    options, warpers = WARPERS[name]
    prompt = torch.tensor([[1, 4, 2]])
    stats = DecodeStats()
    out = sample(
        model, drafter, prompt, max_new_tokens=3, num_return_sequences=NUM_ROWS, seed=11, stats=stats, **options
    )
    law = law_of(model, prompt, warpers)
    assert chi_square_excess(counts_of(out[:, 3:]), law) < LIMIT
    assert stats.accepted_histogram[1] > NUM_ROWS // 3


@pytest.mark.parametrize("wrong", ["typical", "another temperature"])
def test_the_law_test_can_fail(model, drafter, wrong):
    prompt = torch.tensor([[1, 4, 2]])
    options = {"acceptance": "typical"} if wrong == "typical" else {"temperature": 0.8}
    out = sample(model, drafter, prompt, max_new_tokens=3, num_return_sequences=NUM_ROWS, seed=11, **options)
    assert chi_square_excess(counts_of(out[:, 3:]), law_of(model, prompt, [])) > 2 * LIMIT


def left_padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"ids": ids, "attention_mask": mask}


def test_tokens_depend_on_prompt_and_seed_only(model, drafter):
    prompts, seeds = [[1, 2, 3], [4], [5, 1, 1, 2, 3], [1, 2, 3]], [5, 6, 7, 5]
    options = {"max_new_tokens": 12, "top_k": 5, "repetition_penalty": 1.1}
    together = sample(model, drafter, **left_padded(prompts), seed=seeds, **options)[:, 5:]
    backwards = sample(model, drafter, **left_padded(prompts[::-1]), seed=seeds[::-1], **options)[:, 5:].flip(0)
    alone = [
        sample(model, drafter, torch.tensor([prompt]), seed=[seed], **options)[0, len(prompt) :]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert torch.equal(together, backwards)
    assert torch.equal(together, torch.stack(alone))
    assert torch.equal(together[0], together[3])
    assert not torch.equal(together[0], together[1])


def test_seeds(model, drafter):
    ids = torch.tensor([[1, 2, 3]] * 3)
    options = {"max_new_tokens": 16}
    one, same = (sample(model, drafter, ids, seed=9, **options) for _ in range(2))
    assert torch.equal(one, same)
    assert len({tuple(row) for row in one.tolist()}) == 3
    assert not torch.equal(one, sample(model, drafter, ids, seed=10, **options))
    mixed = sample(model, drafter, ids, seed=[3, None, 3], **options)
    assert torch.equal(mixed[0], mixed[2])
    assert not torch.equal(mixed[0], mixed[1])
    assert torch.equal(mixed[0], sample(model, drafter, ids, seed=torch.tensor([3, 4, 5]), **options)[0])
    with pytest.raises(ValueError, match="seed must be one number or 3, one for each row, got 2"):
        sample(model, drafter, ids, seed=[1, 2], **options)


def test_without_a_seed_torch_decides(model, drafter):
    ids = torch.tensor([[1, 2, 3]] * 2)
    torch.manual_seed(4)
    one, other = (sample(model, drafter, ids, max_new_tokens=16) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(one, sample(model, drafter, ids, max_new_tokens=16))
    assert not torch.equal(one, other)


def test_greedy_decoding_leaves_the_random_state_alone(model, drafter):
    before = torch.get_rng_state()
    model.generate(torch.tensor([[1]]), custom_generate=speculative_generate, drafter=drafter, max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_num_return_sequences_expands_the_batch(model, drafter):
    prompts = left_padded([[1, 2], [3]])
    out = sample(model, drafter, **prompts, max_new_tokens=8, num_return_sequences=2, seed=[1, 2, 3, 2])
    assert out.shape == (4, 10)
    assert out[:, :2].tolist() == [[1, 2], [1, 2], [0, 3], [0, 3]]
    assert torch.equal(out[3], sample(model, drafter, **prompts, max_new_tokens=8, seed=[9, 2])[1])


def test_acceptance_by_name_and_by_object(model, drafter):
    ids = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 16, "seed": 3}
    auto = sample(model, drafter, ids, **options)
    assert torch.equal(auto, sample(model, drafter, ids, acceptance="rejection", **options))
    assert torch.equal(auto, sample(model, drafter, ids, acceptance=RejectionAcceptance(), **options))
    typical = sample(model, drafter, ids, acceptance="typical", **options)
    assert torch.equal(typical, sample(model, drafter, ids, acceptance=TypicalAcceptance(), **options))
    assert not torch.equal(typical, auto)
    with pytest.raises(ValueError, match="acceptance='greedy' ignores do_sample=True"):
        sample(model, drafter, ids, acceptance="greedy", **options)
    with pytest.raises(ValueError, match=r"acceptance must be 'auto', 'greedy', .* got 'exact'"):
        sample(model, drafter, ids, acceptance="exact", **options)


def test_sampled_scores_name_the_sampled_tokens(model, drafter):
    out = sample(
        model,
        drafter,
        torch.tensor([[1, 2, 3], [3, 2, 1]]),
        max_new_tokens=10,
        seed=5,
        top_k=2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert torch.isfinite(scores).all()
    assert all((score > -torch.inf).sum(1).tolist() == [2, 2] for score in out.scores)
    assert (scores < -0.7).any()
