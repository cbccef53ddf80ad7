"""Drafting with a second model: its cache stays in step with the text, and neither texts nor laws change."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from specdec_kernels.decoding import DecodeStats, GreedyAcceptance, RejectionAcceptance, decode
from specdec_kernels.decoding.drafters import DraftModelDrafter, MergedDrafter, draft_model
from specdec_kernels.decoding.drafting import first_nodes
from specdec_kernels.decoding.exits import ExitRule
from specdec_kernels.tree import DraftTree

from .test_drafting import decoded
from .test_loop_law import LIMIT, law_of, sample, table  # noqa: F401 (a fixture)
from .toy import CheatingDrafter, TableTarget, ToyTarget, chi_square_excess, pad

PROMPTS = [[3, 1, 4], [5], [2, 7, 1, 8]]
ALWAYS = ExitRule(threshold=0.0, target_rate=None)


class Blurred(ToyTarget):
    """The target's twin, which is sometimes wrong: the weights are disturbed, the vocabulary may be of another size."""

    def __init__(self, batch_size, capacity, noise=0.6, vocab_size=13):
        super().__init__(batch_size, capacity)
        generator = torch.Generator().manual_seed(9)
        self.weight = self.weight + noise * torch.randn(self.weight.shape, generator=generator, dtype=torch.float64)
        extra = 9 * torch.ones(max(0, vocab_size - 13), 8, dtype=torch.float64)  # often the greatest logits
        self.weight = torch.cat([self.weight, extra])[:vocab_size]


class WatchedDrafter(DraftModelDrafter):
    """Check at every step what the draft model's cache holds."""

    def begin(self, prompt_ids, prompt_len, output):
        super().begin(prompt_ids, prompt_len, output)
        self.prompts = [ids[:length] for ids, length in zip(prompt_ids.tolist(), prompt_len.tolist(), strict=True)]
        self.num_accepted = [set() for _ in self.prompts]
        self.last_lengths = self.model.prefix_len

    def propose(self, pending):
        draft = super().propose(pending)
        if draft.ids.shape[1] == 1:
            return draft  # nothing was fed
        lengths = self.model.prefix_len
        for row, prompt in enumerate(self.prompts):
            if self._context.finished[row]:
                assert lengths[row] == self.last_lengths[row], "an ended row grows"
                continue
            text = prompt + list(self._context.emitted[row])
            fed = int(draft.num_nodes[row]) - 2  # all drafts but the last
            assert self.model.cache[row, : lengths[row]].tolist() == text + draft.ids[row, 1 : 1 + fed].tolist()
            assert lengths[row] == len(text) + fed
        self.last_lengths = lengths
        return draft

    def observe(self, draft, output, verification, active):
        super().observe(draft, output, verification, active)
        for row, count in enumerate(verification.num_accepted.tolist()):
            if active[row]:
                num_nodes = draft.ids.shape[1] if draft.num_nodes is None else int(draft.num_nodes[row])
                self.num_accepted[row].add((count, num_nodes - 1))


def test_its_cache_is_in_step_after_partial_and_full_acceptance():
    """Cases 74 and 75."""
    target, drafter = ToyTarget(3, 60), WatchedDrafter(Blurred, max_drafts=3, exit_rule=ALWAYS)
    plain = [target.plain(prompt, 30) for prompt in PROMPTS]
    assert decoded(target, drafter, PROMPTS, [30, 11, 24]) == [plain[0], plain[1][:11], plain[2][:24]]
    assert set.union(*drafter.num_accepted) == {(0, 3), (1, 3), (2, 3), (3, 3)}


def test_the_target_as_its_own_draft_model_is_always_right():
    target, stats = ToyTarget(3, 60), DecodeStats()
    drafter = WatchedDrafter(ToyTarget, max_drafts=4, exit_rule=ALWAYS)
    plain = [target.plain(prompt, 25) for prompt in PROMPTS]
    assert decoded(target, drafter, PROMPTS, 25, stats=stats) == plain
    # The first token comes from the prompt; the last step is cut by the limit.
    assert stats.accepted_histogram == [0, 0, 0, 0, 15]


@pytest.mark.parametrize("vocab_size", [11, 13, 16])
def test_padded_vocabularies(vocab_size):
    """A wider draft model never drafts ids that the target does not have; a narrower one drafts what it knows."""
    target, drafts = ToyTarget(3, 60), []

    class Recording(WatchedDrafter):
        def propose(self, pending):
            drafts.append(super().propose(pending))
            return drafts[-1]

    make = partial(Blurred, vocab_size=vocab_size, noise=0.1)
    prompts = [[token % 11 for token in prompt] for prompt in PROMPTS]
    plain = [target.plain(prompt, 15) for prompt in prompts]
    assert decoded(target, Recording(make, exit_rule=ALWAYS), prompts, 15) == plain
    assert all((draft.ids[:, 1:] < min(13, vocab_size)).all() for draft in drafts)
    options = {"temperature": 1.0, "seeds": torch.tensor([1, 2, 3])}
    drafts.clear()
    decoded(ToyTarget(3, 60), Recording(make, exit_rule=ALWAYS), prompts, 15, **options)
    assert all(draft.logits.shape[-1] == 13 for draft in drafts)
    assert all((draft.logits[..., vocab_size:] == -torch.inf).all() for draft in drafts)
    assert all((draft.ids[:, 1:] < min(13, vocab_size)).all() for draft in drafts)


def test_rows_draft_as_far_as_they_are_sure():
    target = ToyTarget(3, 60)
    drafter = WatchedDrafter(Blurred, max_drafts=6, exit_rule=ExitRule(threshold=0.99))
    plain = [target.plain(prompt, 25) for prompt in PROMPTS]
    assert decoded(target, drafter, PROMPTS, 25) == plain
    lengths = {length for row in drafter.num_accepted for _, length in row}
    assert len(lengths) > 3, lengths
    assert len(set(drafter.exits.threshold.tolist())) == 3, "every row learns from its own acceptance"


@pytest.mark.parametrize(("temperature", "block"), [(1.0, False), (0.6, False), (1.0, True)])
def test_drafts_leave_the_law_alone(table, temperature, block):  # noqa: F811
    """Rows stop where they drew something improbable, in a block, too."""
    other = torch.randn(table.shape, generator=torch.Generator().manual_seed(6))
    drafter = DraftModelDrafter(partial(TableTarget, other), max_drafts=3, exit_rule=ExitRule(threshold=0.2))
    counts = sample(table, lambda seeds: drafter, RejectionAcceptance(block=block), temperature)
    assert chi_square_excess(counts, law_of(table, temperature)) < LIMIT


def test_more_is_accepted_the_more_the_models_agree():
    seeds = torch.arange(3)
    rates = []
    for noise in (0.0, 0.5, 5.0):
        stats = DecodeStats()
        drafter = DraftModelDrafter(partial(Blurred, noise=noise), max_drafts=3, exit_rule=ALWAYS)
        decoded(ToyTarget(3, 60), drafter, PROMPTS, 29, stats=stats, temperature=1.0, seeds=seeds)
        rates.append(stats.mean_accepted)
    assert rates[0] == 3
    assert rates[0] > rates[1] + 0.2 > rates[2] + 0.4


def test_a_row_does_not_depend_on_its_slot_or_neighbours():
    seeds = torch.tensor([11, 12, 13])

    def run(rows):
        picked = [PROMPTS[row] for row in rows]
        drafter = WatchedDrafter(Blurred, max_drafts=4)
        return decoded(ToyTarget(len(rows), 60), drafter, picked, 20, temperature=1.0, seeds=seeds[rows])

    together = run([0, 1, 2])
    assert together[::-1] == run([2, 1, 0])
    assert together == [run([row])[0] for row in range(3)]


class Pausing:
    """A budget that lets nobody draft for a while."""

    def __init__(self, first, last):
        self.pause, self.step = range(first, last), 0

    def choose(self, num_rows, longest):
        self.step += 1
        return 1 if self.step in self.pause else 99


@pytest.mark.parametrize("at_once", [64, 3, 1])
def test_what_was_emitted_in_a_long_pause_is_fed_in_pieces(at_once, monkeypatch):
    """Its cache is checked at every step, and what describes the pieces does not grow with the text."""
    monkeypatch.setattr(draft_model, "FED_AT_ONCE", at_once)
    target, drafter = ToyTarget(3, 60), WatchedDrafter(ToyTarget, max_drafts=2, exit_rule=ALWAYS)
    plain = [target.plain(prompt, 40) for prompt in PROMPTS]
    budget = Pausing(3, 20)
    assert decoded(target, drafter, PROMPTS, [40, 12, 35], budget=budget) == [plain[0], plain[1][:12], plain[2][:35]]
    assert {count for row in drafter.num_accepted for count in row} >= {(0, 0), (2, 2)}
    assert drafter._layout.max_nodes == max(3, at_once)


def test_a_row_near_its_end_has_room_while_another_one_is_fed():
    """Before the model is asked at all, one row has emitted many tokens, the other one few, and is nearly full."""
    prompts, limits = [PROMPTS[0], [2] * 90], [40, 3]
    target, model = ToyTarget(2, 90 + 3 - 1 + 10), WatchedDrafter(ToyTarget, max_drafts=1, exit_rule=ALWAYS)
    plain = [target.plain(prompt, 40) for prompt in prompts]

    class Says(CheatingDrafter):
        """All of the first row's next tokens, until thirty are there; the other row's never."""

        def propose(self, pending):
            draft = super().propose(pending)
            draft.ids[1, 1:] = (draft.ids[1, 1:] + 1) % 13
            return first_nodes(draft, 1 if self.emitted[0] > 30 else 10)

    first = Says(DraftTree.chain(9), plain)
    drafter = MergedDrafter(first, model, max_nodes=10)
    assert decoded(target, drafter, prompts, limits) == [plain[0], plain[1][:3]]


def test_greedy_and_sampled_rows_share_a_batch():
    target = ToyTarget(2, 60)
    options = {"temperature": torch.tensor([0.0, 1.0]), "seeds": torch.tensor([1, 2])}
    rows = decoded(target, WatchedDrafter(Blurred, exit_rule=ALWAYS), [PROMPTS[0]] * 2, 20, **options)
    assert rows[0] == target.plain(PROMPTS[0], 20)
    assert rows[1] != rows[0]


def test_a_draft_model_that_gives_nan_drafts_nothing():
    class Broken(ToyTarget):
        def next_logits(self, context):
            return super().next_logits(context) * (torch.nan if len(context) % 4 == 0 else 1)

    target = ToyTarget(3, 60)
    plain = [target.plain(prompt, 15) for prompt in PROMPTS]
    drafter = DraftModelDrafter(Broken, max_drafts=5, exit_rule=ALWAYS)
    assert decoded(target, drafter, PROMPTS, 15) == plain


def test_a_drafter_serves_one_batch_after_another():
    drafter = WatchedDrafter(Blurred, max_drafts=3)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:]):
        target = ToyTarget(len(prompts), 40)
        assert decoded(target, drafter, prompts, 12) == [target.plain(prompt, 12) for prompt in prompts]


def test_eos_inside_a_draft_ends_the_row_there():
    target = ToyTarget(1, 60)
    plain = target.plain(PROMPTS[0], 20)
    eos = plain[6]
    drafter = WatchedDrafter(ToyTarget, max_drafts=4, exit_rule=ALWAYS)
    rows = decoded(target, drafter, PROMPTS[:1], 20, eos_ids=[eos], acceptance=GreedyAcceptance())
    assert rows == [plain[: plain.index(eos) + 1]]


def test_the_capacity_is_enough_to_the_last_row():
    """The target's cache has exactly the rows that decode asks for; both toys assert that nothing is written past."""
    drafter = WatchedDrafter(ToyTarget, max_drafts=4, exit_rule=ALWAYS)
    target = ToyTarget(1, 3 + 9 - 1 + drafter.max_nodes)
    assert decoded(target, drafter, PROMPTS[:1], 9) == [target.plain(PROMPTS[0], 9)]


def test_rejects():
    with pytest.raises(ValueError, match=r"max_drafts must be in \[1, 1023\], got 0"):
        DraftModelDrafter(ToyTarget, max_drafts=0)
    with pytest.raises(RuntimeError, match="works only inside decode"):
        DraftModelDrafter(ToyTarget).begin(*pad([[1]]), None)
    elsewhere = SimpleNamespace(prefix_len=torch.empty(1, device="meta"))
    steps = decode(
        *(ToyTarget(1, 40), DraftModelDrafter(lambda *_: elsewhere), *pad([[1]])),
        acceptance=GreedyAcceptance(),
        max_new_tokens=3,
    )
    with pytest.raises(ValueError, match="the draft model must be on cpu, got meta"):
        next(steps)
