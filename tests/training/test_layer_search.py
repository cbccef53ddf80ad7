import itertools
import json

import pytest
import torch

from specdec_kernels.decoding import ExitRule, GreedyAcceptance, LayerPlan, decode
from specdec_kernels.decoding.drafters import LayerSkipDrafter
from specdec_kernels.hf import HFTarget
from specdec_kernels.hf.fused_stack import FusedStack
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.training import layer_costs, layer_probe, layer_search
from specdec_kernels.training.data import GenerationOptions
from specdec_kernels.training.generate import Conversation, Limits
from specdec_kernels.training.layer_costs import BlockCosts, Outcome, best_expectation, expectation, measure_costs
from specdec_kernels.training.layer_probe import DraftProbe, SearchOptions, choose_contexts
from specdec_kernels.training.layer_search import search_layers, search_skip_sets, uniform_plan
from tests.hf.tiny import VOCAB, tiny_model
from tests.marks import needs_native

OPTIONS = SearchOptions(num_contexts=12, max_context=40, max_drafts=4)
COSTS = BlockCosts((10.0,) * 4, (20.0,) * 4, 5.0, (125.0, 130.0, 135.0, 140.0, 145.0))


def contexts(count=12):
    generator = torch.Generator().manual_seed(1)
    lengths = [3 + i % 5 for i in range(count)]
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=4)


@pytest.fixture(scope="module")
def probe(model):
    return DraftProbe(model, contexts(), 4)


@pytest.mark.parametrize("plan", [LayerPlan(skipped_attention=frozenset([1])), LayerPlan(skipped_mlp=frozenset([2]))])
def test_matches_are_what_decoding_accepts(model, probe, plan):
    """The first step of a real run from every context, without an early exit."""
    outcome = probe.outcome(plan)
    assert 0 < outcome.matched.double().mean() < 4
    for row, context in enumerate(contexts()):
        rule = ExitRule(threshold=0.0, target_rate=None)
        drafter = LayerSkipDrafter(plan.skipped_attention, plan.skipped_mlp, max_drafts=4, exit_rule=rule)
        target = HFTarget(model, 1, len(context) + 12)
        lengths = torch.tensor([len(context)], dtype=torch.int32)
        steps = decode(
            target, drafter, torch.tensor([context]), lengths, acceptance=GreedyAcceptance(), max_new_tokens=8
        )
        next(steps)
        assert int(next(steps).verification.num_accepted) == outcome.matched[row]


def test_a_trial_leaves_the_contexts_as_they_were(probe):
    plan = LayerPlan(skipped_attention=frozenset([0, 1]))
    first = probe.outcome(plan)
    assert probe.outcome(LayerPlan()).matched.tolist() == [4] * 12
    again = probe.outcome(plan)
    assert torch.equal(first.matched, again.matched)
    assert torch.equal(first.probs, again.probs)


def test_the_expectation_is_the_formula():
    """Two contexts by hand: one matches 3 of its drafts, the other none, and says so."""
    outcome = Outcome(torch.tensor([3, 0]), torch.tensor([[0.9, 0.9, 0.9, 0.1], [0.2, 0.9, 0.9, 0.9]]))
    plan = LayerPlan(skipped_attention=frozenset([0, 1]), skipped_mlp=frozenset([3]))
    assert COSTS.draft_us(plan) == 5 + 20 + 60
    found = best_expectation(outcome, COSTS, 10.0)
    # A threshold between them: 3 drafts and 1; 4 and 1 tokens.
    assert (found.max_drafts, found.tokens_per_step, found.drafts_per_step) == (3, 2.5, 2.0)
    assert 0.2 < found.threshold <= 0.9
    assert found.tokens_per_s == pytest.approx(2.5 / ((3 * 10 + 140 + 10 + 130) / 2) * 1e6)
    always = expectation(outcome, COSTS, 10.0, max_drafts=4, threshold=0.0)
    assert (always.tokens_per_step, always.drafts_per_step) == (2.5, 4.0)
    assert always.tokens_per_s == pytest.approx(2.5 / (4 * 10 + 145) * 1e6)
    # Where a draft costs eight times the model, one is the least evil.
    assert best_expectation(outcome, COSTS, 1000.0).max_drafts == 1


def test_costs_are_measured_for_every_block(model, monkeypatch):
    """By a clock that goes on by 2 µs whenever it is read: a layer takes as much whole as without one of its blocks."""
    reads = itertools.count(step=2000)
    monkeypatch.setattr(layer_costs.time, "perf_counter_ns", lambda: next(reads))
    costs = measure_costs(model, context_len=16, max_drafts=3, repeats=3)
    assert costs == BlockCosts(attention_us=(1.0,) * 4, mlp_us=(1.0,) * 4, rest_us=2.0, verify_us=(2.0,) * 4)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)


def test_a_blocks_cost_is_between_what_it_takes_alone_and_what_it_adds(model, monkeypatch):
    """By a clock that only blocks move: 7 µs attention, 20 µs MLP, 5 µs for each layer that runs at all."""
    now = [0]
    monkeypatch.setattr(layer_costs.time, "perf_counter_ns", lambda: now[0])

    def taking(block, microseconds):
        def hook(*_):
            now[0] += microseconds * 1000

        return block.register_forward_hook(hook)

    layers = model.model.layers
    parts = [(part, us) for x in layers for part, us in ((x.self_attn, 7), (x.mlp, 20), (x.input_layernorm, 5))]
    handles = [taking(*part) for part in [*parts, (model.model.norm, 100)]]
    costs = measure_costs(model, context_len=8, max_drafts=1, repeats=1)
    for handle in handles:
        handle.remove()
    assert costs.attention_us == (9.5,) * 4
    assert costs.mlp_us == (22.5,) * 4
    assert costs.rest_us == 100
    assert costs.verify_us == (100 + 4 * 32,) * 2
    assert costs.draft_us(LayerPlan()) == costs.verify_us[0]


@needs_native
def test_costs_of_a_prepared_model_are_those_of_its_own_kernels(monkeypatch):
    """Its blocks are no modules that hooks could see; and whole forwards stay one call."""
    model = prepare(tiny_model(num_hidden_layers=3).bfloat16())
    calls = []
    whole = FusedStack._run
    monkeypatch.setattr(FusedStack, "_run", lambda self, *given: calls.append(1) or whole(self, *given))
    costs = measure_costs(model, context_len=8, max_drafts=2, repeats=2)
    assert len(calls) == 1 + 4 * 3, "the prefill, then each length in two rounds and two that warm up"
    assert len(costs.attention_us) == len(costs.mlp_us) == 3
    assert all(us > 0 for us in (*costs.attention_us, *costs.mlp_us, costs.rest_us, *costs.verify_us))


def test_uniform_plans_skip_as_many_blocks():
    plan = LayerPlan(skipped_attention=frozenset([0, 1, 2]), skipped_mlp=frozenset([5]))
    uniform = uniform_plan(plan, 9)
    assert (sorted(uniform.skipped_attention), sorted(uniform.skipped_mlp)) == ([1, 4, 7], [4])
    assert uniform_plan(LayerPlan(), 9) == LayerPlan()
    assert len(uniform_plan(LayerPlan(skipped_mlp=frozenset(range(9))), 9).skipped_mlp) == 9


def test_the_search_starts_from_uniform_plans_and_asks_neighbours_of_the_best(probe, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    asked = []
    neighbour = layer_search._Trials.neighbour

    def noted(trials, *args):
        asked.append((trials.best[0], [plan for plan, _ in trials.entries], neighbour(trials, *args)))
        return asked[-1][2]

    monkeypatch.setattr(layer_search._Trials, "neighbour", noted)
    file = tmp_path / "trials.jsonl"
    search_layers(probe, COSTS, file, OPTIONS, num_trials=40)
    plans = [plan for plan, _ in layer_search._Trials(file).entries]
    guesses = layer_search.first_guesses(probe, COSTS)
    assert plans[: len(guesses)] == guesses
    assert guesses[1::2] == [uniform_plan(guess, 4) for guess in guesses[::2]]
    assert len(asked) == 20, "every second time"
    for best, tried, plan in asked:
        changed = [best.skipped_attention ^ plan.skipped_attention, best.skipped_mlp ^ plan.skipped_mlp]
        assert 1 <= sum(map(len, changed)) <= 2
        assert plan not in tried
    assert all(plan in plans[len(guesses) :] for _, _, plan in asked[:-1]), "the last one has no trial left"


def test_contexts_are_cut_in_the_answers_and_parts_are_kept_apart(monkeypatch):
    monkeypatch.setattr(layer_probe, "is_held_out", lambda c: c.index % 2 == 0)
    conversations = [Conversation(i, (i, 1), tuple(range(10)), i % 4 < 2) for i in range(20)]
    chosen = {part: choose_contexts(conversations, OPTIONS, held_out=part) for part in (True, False)}
    for part, found in chosen.items():
        assert {c[0] % 2 == 0 for c in found} == {part}
        assert all(c[1:] == (1, *range(len(c) - 2)) for c in found)
        assert [c[0] % 4 < 2 for c in found][:10] == [True] * 5 + [False] * 5
        assert len(set(found)) == 12, "ten texts, two of them cut twice"
        assert len({c[0] for c in found}) == 10
    assert len({len(c) for c in chosen[True]}) > 2
    with pytest.raises(ValueError, match="no held-out context of at most 1 tokens"):
        choose_contexts(conversations, SearchOptions(max_context=1), held_out=True)


def test_the_search_finds_one_of_the_best_of_all_and_goes_on(tmp_path):
    pytest.importorskip("optuna")
    small = DraftProbe(tiny_model(num_hidden_layers=3), contexts(), 4)
    costs, file = BlockCosts((10.0,) * 3, (20.0,) * 3, 5.0, COSTS.verify_us), tmp_path / "trials.jsonl"
    plan, best, tried = search_layers(small, costs, file, OPTIONS, num_trials=20)
    assert tried == 20
    speeds = []
    for bits in itertools.product([False, True], repeat=6):
        skipped = [frozenset(i for i in range(3) if bits[first + i]) for first in (0, 3)]
        every = LayerPlan(skipped_attention=skipped[0], skipped_mlp=skipped[1])
        speeds.append(best_expectation(small.outcome(every), costs, costs.draft_us(every)).tokens_per_s)
    assert best.tokens_per_s in speeds
    assert sum(speed > best.tokens_per_s for speed in speeds) <= 1, "of 64"
    assert search_layers(small, costs, file, OPTIONS, num_trials=20) == (plan, best, 20), "nothing is left to try"
    file.write_text(file.read_text() + '\n{"skipped_attention": [1')  # as an interruption leaves it
    _, better, tried = search_layers(small, costs, file, OPTIONS, num_trials=25)
    assert tried == 25
    assert better.tokens_per_s >= best.tokens_per_s
    assert search_layers(small, costs, file, OPTIONS, num_trials=25)[2] == 25, "the cut line is passed over"


def test_the_same_search_finds_the_same(probe, tmp_path):
    pytest.importorskip("optuna")
    found = [search_layers(probe, COSTS, tmp_path / name, OPTIONS, num_trials=20) for name in ("a", "b")]
    assert found[0] == found[1]


def test_from_nothing_to_a_file(tiny, tmp_path, capsys):
    pytest.importorskip("optuna")
    generation = GenerationOptions(tiny, None, "float32", 0, Limits(user_len=4, answer_len=12))

    def search(options=OPTIONS, num_trials=12):
        return search_skip_sets(
            tmp_path / "out", tmp_path / "work", generation, options, num_trials=num_trials, num_tokens=700,
            num_slots=16, command="the command",
        )  # fmt: skip

    drafter = search()
    assert "uniform, as many blocks" in capsys.readouterr().out
    loaded = LayerSkipDrafter.from_pretrained(tmp_path / "out")
    assert (loaded.plan, loaded.max_drafts, loaded.exit_rule) == (drafter.plan, drafter.max_drafts, drafter.exit_rule)
    entry = json.loads((tmp_path / "out" / "layer_skip.json").read_text())
    assert (entry["command"], entry["num_trials"]) == ("the command", 12)
    assert entry["held_out"]["max_drafts"] == drafter.max_drafts
    assert entry["held_out"]["threshold"] == drafter.exit_rule.threshold
    costs = (tmp_path / "work" / "costs.json").read_text()
    search(num_trials=14)
    assert (tmp_path / "work" / "costs.json").read_text() == costs, "a continued search keeps its costs"
    with pytest.raises(ValueError, match=r"a search with another \w+ \(.*, now "):
        search(SearchOptions(num_contexts=3))


def test_texts_without_held_out_ones_are_refused_before_the_search(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    texts = [Conversation(0, (1,), (2, 3), True)]
    monkeypatch.setattr(layer_search, "generate_conversations", lambda *args, **options: texts)
    monkeypatch.setattr(layer_search, "load_model", lambda *args: pytest.fail("too late"))
    generation = GenerationOptions("no model", None, "float32", 0, Limits())
    with pytest.raises(ValueError, match="no held-out context of at most 256 tokens"):
        search_skip_sets(tmp_path, tmp_path, generation, SearchOptions(), num_trials=1, num_tokens=1)
