"""The loop on a toy target: what is emitted, where rows end, what the cache holds."""

import math
from itertools import chain

import pytest
import torch

from specdec_kernels.decoding import DecodeStats, GreedyAcceptance, RejectionAcceptance, TypicalAcceptance, decode
from specdec_kernels.tree import DraftTree

from .toy import POISON, CheatingDrafter, ToyTarget, draft_of, pad

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
BRANCHY = DraftTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0], [1, 0, 1]])


def run(target, drafter, prompts=PROMPTS, **options):
    """Return the steps of a run and each row's tokens."""
    options = {"acceptance": GreedyAcceptance(), "max_new_tokens": 12} | options
    steps = list(decode(target, drafter, *pad(prompts), **options))
    return steps, [list(chain(*parts)) for parts in zip(*(step.tokens for step in steps), strict=True)]


def make(tree=BRANCHY, prompts=PROMPTS, *, right=True, max_new_tokens=12):
    """Return a target with exactly the capacity a run needs, a drafter, and the plain continuations."""
    capacity = max(map(len, prompts)) + max_new_tokens - 1 + tree.num_nodes
    target = ToyTarget(len(prompts), capacity)
    plain = [target.plain(prompt, max_new_tokens + tree.max_depth) for prompt in prompts]
    return target, CheatingDrafter(tree, plain, right=right), plain


@pytest.mark.parametrize("tree", [DraftTree.chain(0), DraftTree.chain(3), BRANCHY], ids=["root", "chain3", "tree"])
@pytest.mark.parametrize("right", [True, False], ids=["oracle", "adversary"])
def test_equals_plain_decoding_token_for_token(tree, right):
    target, drafter, plain = make(tree, right=right)
    _, rows = run(target, drafter)
    assert rows == [ids[:12] for ids in plain]


@pytest.mark.parametrize("tree", [DraftTree.chain(3), BRANCHY], ids=["chain3", "tree"])
def test_an_oracle_has_everything_accepted(tree):
    stats = DecodeStats()
    target, drafter, _ = make(tree, max_new_tokens=1 + 4 * 3)
    steps, _ = run(target, drafter, max_new_tokens=1 + 4 * 3, stats=stats)
    assert [[len(tokens) for tokens in step.tokens] for step in steps] == [[1, 1, 1], [4] * 3, [4] * 3, [4] * 3]
    assert stats.accepted_histogram == [0, 0, 0, 9]
    assert (stats.tokens_per_step, stats.mean_accepted, stats.num_tokens) == (4.0, 3.0, 39)


def test_an_adversary_costs_nothing_but_time():
    stats = DecodeStats()
    target, drafter, _ = make(right=False)
    steps, _ = run(target, drafter, stats=stats)
    assert all(len(tokens) == 1 for step in steps for tokens in step.tokens)
    assert (target.num_forwards, stats.accepted_histogram, stats.tokens_per_step) == (11, [33], 1.0)


def test_the_cache_holds_all_but_the_last_token_after_each_step():
    target, drafter, _ = make()
    rows = [list(prompt) for prompt in PROMPTS]
    for step in decode(target, drafter, *pad(PROMPTS), acceptance=GreedyAcceptance(), max_new_tokens=[12, 3, 7]):
        for row, tokens in enumerate(step.tokens):
            rows[row] += tokens
            length = len(rows[row]) - 1
            assert int(target.prefix_len[row]) == length
            assert target.cache[row, :length].tolist() == rows[row][:-1]


def test_each_row_keeps_its_own_limit_and_ended_rows_stay_still():
    target, drafter, plain = make()
    steps, rows = run(target, drafter, max_new_tokens=[12, 1, 6])
    assert rows == [plain[0][:12], plain[1][:1], plain[2][:6]]
    assert [step.finished for step in steps] == [
        [False, True, False],
        [False, True, False],
        [False, True, True],
        [True, True, True],
    ]
    assert [step.tokens[1] for step in steps[1:]] == [[], [], []]
    assert target.prefix_len.tolist() == [5 + 11, 1 + 0, 3 + 5]
    assert drafter.emitted[1] == 1  # the drafter was not told that an ended row goes on


def test_one_token_needs_no_forward():
    target, drafter, plain = make(max_new_tokens=1)
    _, rows = run(target, drafter, max_new_tokens=1)
    assert rows == [ids[:1] for ids in plain]
    assert target.num_forwards == 0


def test_eos_inside_a_draft_ends_the_row_there():
    target, drafter, plain = make(DraftTree.chain(6))
    position = next(i for i in range(2, 6) if plain[0][i] not in plain[0][:i])
    eos = plain[0][position]
    stats = DecodeStats()
    _, rows = run(target, drafter, eos_ids=[eos, 99], max_new_tokens=12, stats=stats)
    expected = [ids[: ids.index(eos) + 1] if eos in ids[:12] else ids[:12] for ids in plain]
    assert rows == expected
    assert [len(row) for row in rows] != [12] * 3
    assert target.prefix_len.tolist() == [
        len(prompt) + len(ids) - 1 for prompt, ids in zip(PROMPTS, expected, strict=True)
    ]
    assert stats.num_tokens == sum(map(len, expected))
    # What stands behind the EOS was accepted by the target, and does not count.
    one = DecodeStats()
    target, drafter, _ = make(DraftTree.chain(6), PROMPTS[:1])
    run(target, drafter, PROMPTS[:1], eos_ids=[eos], stats=one)
    assert one.accepted_histogram == [0] * position + [1]
    assert one.mean_accepted == position


def test_eos_as_the_first_token():
    target, drafter, plain = make(prompts=PROMPTS[:1])
    _, rows = run(target, drafter, PROMPTS[:1], eos_ids={plain[0][0]})
    assert rows == [plain[0][:1]]
    assert target.num_forwards == 0


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_stop_rule_sees_every_token_once_and_cuts(cut):
    target, drafter, plain = make()
    seen = [[] for _ in PROMPTS]

    def stop(step):
        for row, new in enumerate(step.tokens):
            seen[row] += new
        return [None, cut if len(seen[1]) > 1 else None, None]

    _, rows = run(target, drafter, stop=stop)
    assert rows == [plain[0][:12], plain[1][: 1 + cut], plain[2][:12]]
    assert [len(row) for row in seen] == [12, 5, 12]
    assert int(target.prefix_len[1]) == 1 + cut


def test_nothing_runs_when_the_cache_is_one_row_too_small():
    target, drafter, _ = make()
    small = ToyTarget(3, target.capacity - 1)
    with pytest.raises(ValueError, match=f"capacity must be at least {target.capacity} .*got {target.capacity - 1}"):
        decode(small, drafter, *pad(PROMPTS), acceptance=GreedyAcceptance(), max_new_tokens=12)
    assert (small.cache == POISON).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"max_new_tokens": [1, 2]}, "max_new_tokens must be >= 1 for each of 3 rows"),
        ({"prompt_len": torch.tensor([5, 0, 3], dtype=torch.int32)}, r"prompt_len must be in \[1, 5\], got 0"),
        ({"prompt_len": torch.tensor([5, 1, 6], dtype=torch.int32)}, r"prompt_len must be in \[1, 5\], got 6"),
        ({"prompt_len": torch.tensor([5], dtype=torch.int32)}, r"prompt_len must have shape \(3,\), got \(1,\)"),
        ({"prompt_ids": torch.tensor([1, 2, 3])}, r"prompt_ids must have shape \(B, L\), got \(3,\)"),
        ({"seeds": torch.zeros(2, dtype=torch.int64)}, r"seeds must have shape \(3,\), got \(2,\)"),
        ({"temperature": torch.zeros(3, 1)}, r"temperature must have shape \(3,\), got \(3, 1\)"),
    ],
)
def test_rejects(change, message):
    target, drafter, _ = make()
    ids, lengths = pad(PROMPTS)
    arguments = {"prompt_ids": ids, "prompt_len": lengths, "max_new_tokens": 12, "acceptance": GreedyAcceptance()}
    with pytest.raises(ValueError, match=f"decode: {message}"):
        decode(target, drafter, **(arguments | change))
    assert (target.cache == POISON).all()


def test_a_drafter_that_breaks_its_word_is_stopped_before_the_forward():
    target, drafter, _ = make()
    drafter.propose = lambda pending: draft_of(DraftTree.chain(9), torch.zeros(3, 10, dtype=torch.int64))
    with pytest.raises(ValueError, match="max_nodes is 8, got 10 nodes"):
        run(target, drafter)
    assert target.num_forwards == 0


def test_a_row_with_nan_logits_ends_alone():
    target, drafter, plain = make()
    broken = {"row": 1, "after": 3}

    def process(logits, nodes, *, draft, emitted):
        if len(emitted[broken["row"]]) >= broken["after"]:
            logits = logits.clone()
            logits[broken["row"]] = math.nan
        return logits

    steps, rows = run(target, drafter, process_logits=process)
    assert rows == [plain[0][:12], plain[1][:5], plain[2][:12]]
    assert steps[-1].failed == [False, True, False]
    assert steps[-1].finished == [True] * 3


def test_processed_logits_are_the_ones_judged_and_know_every_context():
    """Forbid what the context says: the token two before the next one, and the prompt's last one."""
    target, drafter, _ = make()
    prompts = PROMPTS

    def forbid(context, logits):
        logits[context[-2:]] = -math.inf
        return logits

    def process(logits, nodes, *, draft, emitted):
        logits = logits.clone()
        parents = draft.parents[0].tolist()
        for row, at in enumerate(nodes.tolist()):
            path = []
            while at > 0:
                path.insert(0, int(draft.ids[row, at]))
                at = parents[at]
            forbid(prompts[row] + list(emitted[row]) + path, logits[row])
        return logits

    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(forbid(ids, target.next_logits(torch.tensor(ids))).argmax()))
        expected.append(ids[len(prompt) :])
    drafter.continuations = [ids + [0] * 4 for ids in expected]
    stats = DecodeStats()
    _, rows = run(target, drafter, process_logits=process, stats=stats)
    assert rows == expected
    assert stats.mean_accepted > 2


@pytest.mark.parametrize("acceptance", [GreedyAcceptance(), TypicalAcceptance()], ids=["walk", "all nodes"])
def test_emitted_tokens_are_chosen_from_the_logits_the_step_names(acceptance):
    target, drafter, _ = make()

    def process(logits, nodes, *, draft, emitted):
        return -logits

    for step in run(target, drafter, acceptance=acceptance, process_logits=process)[0]:
        for row, tokens in enumerate(step.tokens):
            for j, token in enumerate(tokens):
                assert torch.equal(step.processed_logits[row, j], -step.raw_logits[row, j])
                assert int(step.processed_logits[row, j].argmax()) == token


@pytest.mark.parametrize("tree", [DraftTree.chain(2), BRANCHY], ids=["chain2", "tree"])
def test_sampled_tokens_do_not_depend_on_slot_or_neighbours(tree):
    prompts, seeds = [*PROMPTS, [7, 7], [1, 2]], torch.tensor([11, 12, 11, -5, 2**62])
    limits = [9, 4, 9, 2, 6]

    def sample(rows):
        chosen = [prompts[row] for row in rows]
        target = ToyTarget(len(rows), 40, scale=0.5)
        drafter = CheatingDrafter(tree, [target.plain(prompt, 15) for prompt in chosen])
        options = {
            "acceptance": RejectionAcceptance(),
            "temperature": 1.0,
            "seeds": seeds[rows],
            "max_new_tokens": [limits[row] for row in rows],
        }
        return dict(zip(rows, run(target, drafter, chosen, **options)[1], strict=True))

    together = sample([0, 1, 2, 3, 4])
    for rows in ([4, 3, 2, 1, 0], [2], [1, 4], [0, 3]):
        assert sample(rows) == {row: together[row] for row in rows}
    assert len({tuple(tokens[:2]) for tokens in together.values()}) > 1


def test_greedy_rows_share_a_batch_with_sampled_ones():
    target, drafter, plain = make()
    temperature = torch.tensor([0.0, 2.0, 0.0])
    seeds = torch.tensor([1, 2, 3])
    _, rows = run(target, drafter, acceptance=RejectionAcceptance(), temperature=temperature, seeds=seeds)
    assert rows[0] == plain[0][:12]
    assert rows[2] == plain[2][:12]
    assert rows[1] != plain[1][:12]


def test_closing_the_iterator_ends_the_run_and_its_clock():
    target, drafter, _ = make()
    stats = DecodeStats()
    steps = decode(target, drafter, *pad(PROMPTS), acceptance=GreedyAcceptance(), max_new_tokens=12, stats=stats)
    next(steps)
    next(steps)
    steps.close()
    assert target.num_forwards == 1
    assert stats.num_steps == 1
    assert all(stats.phase_time_us[phase] > 0 for phase in ("prefill", "propose", "forward", "verify", "compact"))


def test_stats_of_several_runs_add_up_and_print():
    stats = DecodeStats()
    for _ in range(2):
        target, drafter, _ = make()
        run(target, drafter, stats=stats)
    assert (stats.num_rows, stats.num_tokens) == (6, 72)
    assert math.isclose(stats.tokens_per_s, 72 / sum(stats.phase_time_us.values()) * 1e6)
    text = str(stats)
    assert f"tokens per step   {stats.tokens_per_step:.2f}" in text
    assert all(phase in text for phase in stats.phase_time_us)
    assert "nan" in str(DecodeStats())
