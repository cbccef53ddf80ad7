"""Exactness: the emitted tokens follow the target's own law, to 1e-6, for every rule that claims it."""

import pytest
import torch

from specdec_kernels import philox_uniforms, verify_chain

from .verify_law import Setting

TOLERANCE = 1e-6
CHAIN1, CHAIN2 = (-1, 0), (-1, 0, 1)
SIBLINGS2, SIBLINGS3, SIBLINGS4 = (-1, 0, 0), (-1, 0, 0, 0), (-1, 0, 0, 0, 0)
FORK_BELOW, TWO_LEVELS, TWO_CHAINS = (-1, 0, 1, 1), (-1, 0, 0, 1, 1), (-1, 0, 0, 1, 2)

SHAPES = [
    pytest.param(CHAIN1, 5, id="chain1-V5"),
    pytest.param(CHAIN2, 4, id="chain2-V4"),
    pytest.param(SIBLINGS2, 5, id="siblings2-V5"),
    pytest.param(SIBLINGS3, 4, id="siblings3-V4"),
    pytest.param(FORK_BELOW, 3, id="fork-below-V3"),
    pytest.param(TWO_LEVELS, 3, id="two-levels-V3"),
    pytest.param(TWO_CHAINS, 3, id="two-chains-V3"),
]


@pytest.mark.parametrize(("parents", "vocab"), SHAPES)
def test_deterministic_drafts(backend, parents, vocab):
    """Exact for every single filling, duplicate siblings included: a deterministic drafter may choose any."""
    assert Setting(parents, vocab).worst_error(sampled=False) < TOLERANCE


@pytest.mark.parametrize("with_replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize(("parents", "vocab"), SHAPES)
def test_sampled_drafts(backend, parents, vocab, with_replacement):
    assert Setting(parents, vocab, with_replacement=with_replacement, temperature=0.5).error() < TOLERANCE


def test_four_siblings_of_five_tokens(backend):
    assert Setting(SIBLINGS4, 5).error() < TOLERANCE


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
@pytest.mark.parametrize("vocab", [3, 4])
def test_chain_and_block(backend, vocab, block):
    setting = Setting(CHAIN2, vocab, temperature=2.0)
    assert setting.error(chain=True, block=block) < TOLERANCE
    assert setting.worst_error(sampled=False, chain=True, block=block) < TOLERANCE


def test_fp32_logits(backend):
    assert Setting(TWO_LEVELS, 3, dtype=torch.float32).error() < TOLERANCE


def test_drafts_beyond_the_last_drawable(backend):
    """Three tokens fill three siblings; what fills the fourth was not drawn, and is judged as chosen."""
    setting = Setting(SIBLINGS4, 3)
    setting.draw_from(setting.probs, chosen={4: 2})
    assert setting.error() < TOLERANCE


def test_draft_outside_its_own_distribution(backend):
    """The drafter's filter left tokens 0 and 1, and the second sibling is always token 2."""
    setting = Setting(SIBLINGS2, 3)
    setting.draft_logits[..., 2] = -torch.inf
    setting.draw_from(setting.draft_logits.softmax(-1), chosen={2: 2})
    assert setting.error() < TOLERANCE


@pytest.mark.parametrize("parents", [CHAIN2, TWO_LEVELS], ids=["chain2", "two-levels"])
def test_sampled_drafts_may_be_judged_as_chosen(backend, parents):
    """One-hot q is exact for drafts that came about in any way; it only accepts fewer of them."""
    setting = Setting(parents, 3)
    assert setting.error(sampled=False) < TOLERANCE
    assert setting.accepted(sampled=False) < setting.accepted() - 0.01


@pytest.mark.parametrize("parents", [CHAIN1, SIBLINGS2], ids=["chain1", "siblings2"])
def test_control_chosen_drafts_judged_as_sampled(backend, parents):
    """Negative control: a beam's or a top-k's candidates are no samples of q."""
    setting = Setting(parents, 3)
    setting.draw_from(setting.probs, chosen={1: 0, 2: 1})
    assert setting.error() > 0.01


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_control_q_in_another_precision(backend, block):
    """Negative control: sampled from bf16 probabilities, judged by fp32 ones."""
    setting = Setting(CHAIN2, 3)
    rounded = setting.probs.bfloat16().double()
    setting.draw_from(rounded / rounded.sum(-1, keepdim=True))
    assert setting.error(chain=True, block=block) > 100 * TOLERANCE
    setting.draft_logits = rounded.log()
    assert setting.error(chain=True, block=block) < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_default_is_exact_with_replacement_too(backend, seed):
    """A sibling drawn twice is no news: judged as without replacement it is never accepted."""
    setting = Setting(SIBLINGS3, 4, seed=seed)
    setting.draw_from(setting.probs, with_replacement=True)
    assert setting.error() < TOLERANCE


def test_control_draws_without_replacement_judged_as_with(backend):
    """Negative control: the flag is a promise."""
    setting = Setting(SIBLINGS3, 4, with_replacement=True)
    setting.draw_from(setting.probs, with_replacement=False)
    assert setting.error() > 0.01


def test_control_temperature_on_one_side(backend):
    """Negative control: the drafter sampled at temperature 1, the rule divides its logits by 0.5."""
    setting = Setting(CHAIN1, 3, temperature=0.5)
    setting.draw_from(setting.draft_logits.softmax(-1))
    assert setting.error() > 0.01
    setting.draft_logits *= 0.5 / 1.0
    assert setting.error() < TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_chain_acceptance_is_the_overlap(backend, seed):
    """No rule accepts more than sum(min(p, q)), and the chain reaches it."""
    setting = Setting(CHAIN1, 7, seed=seed)
    p = setting.target.joint().sum(1)
    overlap = torch.minimum(p, setting.probs[0, 0]).sum().item()
    assert setting.accepted(chain=True) == pytest.approx(overlap, abs=TOLERANCE)
    assert setting.accepted(chain=True, block=True) == pytest.approx(overlap, abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(5))
def test_sampled_siblings_beat_target_only_matching(backend, seed):
    """Drawing the target's token first and looking for it among the siblings is the least a rule must reach."""
    setting = Setting(SIBLINGS3, 4, seed=seed)
    p = setting.target.joint().sum(1)
    hits = (setting.ids[:, 1:, None] == torch.arange(4)).any(1)
    matching = (setting.weights * (hits * p).sum(1)).sum().item()
    assert setting.accepted() >= matching - TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_block_accepts_at_least_the_chain(backend, seed):
    setting = Setting(CHAIN2, 4, seed=seed)
    assert setting.accepted(chain=True, block=True) >= setting.accepted(chain=True) - TOLERANCE


def test_block_accepts_more_somewhere(backend):
    gains = [
        s.accepted(chain=True, block=True) - s.accepted(chain=True)
        for s in (Setting(CHAIN2, 4, seed=i) for i in range(5))
    ]
    assert max(gains) > 0.01


def _first_tokens(draft, num_draws, vocab=1000, chunk=100):
    """Judge one draft many times; ``draft(q, uniforms (R,)) -> (R,)``. Return counts of the first emitted token."""
    p_logits, q_logits = 2 * torch.randn(2, vocab)
    counts = torch.zeros(vocab)
    for start in range(0, num_draws, chunk):
        seeds = torch.arange(start, start + chunk)
        u = philox_uniforms(seeds, torch.zeros_like(seeds), 3)
        ids = draft(q_logits.double().softmax(-1), u[:, 2].double())[:, None]
        target, drafter = p_logits.expand(chunk, 2, vocab), q_logits.expand(chunk, 1, vocab)
        result = verify_chain(ids, target, drafter, torch.ones(chunk), u[:, :2])
        counts += result.output_ids[:, 0].bincount(minlength=vocab)
    return counts, p_logits.double().softmax(-1)


def _chi_square_excess(counts, probs):
    """Return how many standard deviations chi-square lies above its mean; bins that expect fewer than 5 are merged."""
    expected = probs * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    freedom = len(expected) - 1
    return ((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5).item()


def test_marginal_at_a_thousand_tokens(backend):
    counts, probs = _first_tokens(lambda q, u: torch.searchsorted(q.cumsum(0), u), 200_000)
    assert abs(_chi_square_excess(counts, probs)) < 4


def test_control_marginal_of_chosen_drafts(backend):
    """Negative control for the chi-square: always the likeliest token is no sample."""
    counts, probs = _first_tokens(lambda q, u: q.argmax().expand(len(u)), 20_000)
    assert _chi_square_excess(counts, probs) > 20
