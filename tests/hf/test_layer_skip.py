"""Layer skipping: the text and the law of the target, a shared cache, adaptive exits, and the file."""

import json

import pytest
import torch

from specdec_kernels.decoding import ExitRule
from specdec_kernels.decoding.drafters import LayerSkipDrafter
from specdec_kernels.hf import HFTarget
from tests.decoding.test_loop_law import LIMIT
from tests.decoding.toy import ToyTarget
from tests.hf.self_drafting import BATCHES, LENGTHS, NEW_TOKENS, excess, generated, law_model
from tests.hf.tiny import tiny_model

NO_EXIT = ExitRule(threshold=0.0, target_rate=None)


def skipping(attention=(1,), mlp=(1,), max_drafts=4, exit_rule=NO_EXIT):
    return LayerSkipDrafter(attention, mlp, max_drafts=max_drafts, exit_rule=exit_rule)


@pytest.mark.parametrize(("model_type", "lengths"), BATCHES, ids=lambda v: v if isinstance(v, str) else f"B{len(v)}")
def test_text_equals_generate(model_type, lengths):
    model = tiny_model(model_type)
    expected, _ = generated(model, lengths=lengths)
    actual, stats = generated(model, skipping([0], [1]), lengths)
    assert torch.equal(actual, expected)
    assert stats.num_row_steps > 0


def test_a_draft_that_skips_nothing_is_accepted_whole():
    """So the draft has the target's own cache, position and mask at every node, in every row."""
    model = tiny_model(num_hidden_layers=4)
    expected, _ = generated(model)
    actual, stats = generated(model, skipping((), (), max_drafts=3))
    assert torch.equal(actual, expected)
    # 14 tokens in each of four rows: one from the prompt, then 4 + 4 + 4 + 1.
    assert stats.accepted_histogram == [0, 4, 0, 12]


def test_skipping_everything_still_gives_the_text():
    model = tiny_model(num_hidden_layers=4)
    expected, _ = generated(model)
    assert torch.equal(generated(model, skipping(range(4), range(4)))[0], expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_text_has_the_targets_law(temperature):
    rule = ExitRule(threshold=0.4, step=0.2)
    assert excess(law_model(), skipping([1, 2], [2], 2, rule), temperature) < LIMIT


def test_a_misreported_distribution_is_found_out(monkeypatch):
    """The negative control of the test above."""
    propose = LayerSkipDrafter.propose

    def lie(self, pending):
        draft = propose(self, pending)
        return draft._replace(logits=torch.zeros_like(draft.logits))

    monkeypatch.setattr(LayerSkipDrafter, "propose", lie)
    assert excess(law_model(), skipping([1, 2], [2], 2), 1.0) > 2 * LIMIT


def test_a_rows_sample_does_not_depend_on_the_batch():
    model = tiny_model(num_hidden_layers=4)
    rule = ExitRule(threshold=0.3, step=0.2)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    together, stats = generated(model, skipping([2], [1], exit_rule=rule), seed=[5, 6, 7, 8], **options)
    assert stats.mean_accepted > 0.2
    for row, length in enumerate(LENGTHS):
        alone, _ = generated(model, skipping([2], [1], exit_rule=rule), [length], seed=[5 + row], **options)
        assert torch.equal(alone[0, length:], together[row, max(LENGTHS) :])


def test_eos_inside_a_draft_ends_the_row():
    model = tiny_model(num_hidden_layers=4)
    expected, _ = generated(model)
    eos = int(expected[0, 12 + 5])
    options = {"eos_token_id": eos}
    expected, _ = generated(model, **options)
    actual, _ = generated(model, skipping((), (), 6), **options)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_stops_at_the_limit(max_new_tokens):
    model = tiny_model(num_hidden_layers=4)
    options = {"max_new_tokens": max_new_tokens}
    expected, _ = generated(model, **options)
    assert torch.equal(generated(model, skipping((), (), 8), **options)[0], expected)


def test_rows_stop_drafting_on_their_own():
    model = tiny_model(num_hidden_layers=4)
    drafter, seen = skipping([1], [2], 6, ExitRule(threshold=0.12, step=0.04, threshold_decay=0.5)), []
    propose = drafter.propose

    def recording(pending):
        draft = propose(pending)
        seen.append((draft.num_nodes.tolist(), draft.ids.shape[1], drafter.exits.threshold.tolist()))
        return draft

    drafter.propose = recording
    expected, _ = generated(model)
    assert torch.equal(generated(model, drafter)[0], expected)
    assert any(len({n for n in nodes if n > 1}) > 1 for nodes, _, _ in seen), "rows of one step differ"
    assert all(max(nodes) == longest for nodes, longest, _ in seen), "the draft is as long as its longest row"
    assert len({round(t, 6) for _, _, thresholds in seen for t in thresholds}) > 4, "the thresholds move"


def test_the_draft_runs_only_what_is_not_skipped_and_once_for_each_token():
    model = tiny_model(num_hidden_layers=4)
    calls = [0, 0]
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    model.model.layers[2].self_attn.register_forward_hook(lambda *_: calls.__setitem__(1, calls[1] + 1))
    _, stats = generated(model, skipping([1], [], 3), [5])
    assert calls[0] == 1 + stats.num_steps
    assert calls[1] == calls[0] + 3 * stats.num_steps


def test_a_target_that_cannot_run_in_part_is_refused():
    context = type("Context", (), {"target": ToyTarget(1, 9)})()
    with pytest.raises(TypeError, match=r"run in part .LayeredTarget., got ToyTarget"):
        skipping().bind(context)
    with pytest.raises(RuntimeError, match="calls bind and begin"):
        skipping().propose(torch.tensor([1]))


def test_layers_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match=r"skipped_mlp must hold layers in \[0, 3\), got \[7\]"):
        generated(tiny_model(), skipping([1], [7]))
    with pytest.raises(ValueError, match="max_drafts must be in"):
        skipping(max_drafts=0)


@pytest.mark.parametrize(
    "rule", [ExitRule(), ExitRule(0.25), ExitRule(0.25, target_rate=None), ExitRule(0.25, 0.8, 0.1, 0.2, 0.3)], ids=str
)
def test_saves_and_loads(tmp_path, rule):
    drafter = LayerSkipDrafter([3, 1], [2], max_drafts=5, exit_rule=rule)
    drafter.metadata = {"expected_tokens_per_s": 51.5}
    drafter.save_pretrained(tmp_path / "new")
    for path in (tmp_path / "new", tmp_path / "new" / "layer_skip.json"):
        loaded = LayerSkipDrafter.from_pretrained(path)
        assert loaded.plan == drafter.plan
        assert (loaded.max_drafts, loaded.exit_rule, loaded.metadata) == (5, drafter.exit_rule, drafter.metadata)
    fixed = LayerSkipDrafter.from_pretrained(tmp_path / "new", exit_rule=NO_EXIT)
    assert fixed.exit_rule == NO_EXIT
    (tmp_path / "wrong.json").write_text(json.dumps({"choices": []}))
    with pytest.raises(ValueError, match=r"wrong.json must hold skipped_attention"):
        LayerSkipDrafter.from_pretrained(tmp_path / "wrong.json")


def test_the_cache_after_partial_acceptance_is_the_models_own():
    """Every committed row holds what a plain forward over the text puts there, in the skipped layers too."""
    model = tiny_model(num_hidden_layers=4)
    kept = []
    make = HFTarget.commit

    def commit(self, *arguments):
        make(self, *arguments)
        kept.append(self)

    HFTarget.commit = commit
    try:
        text, stats = generated(model, skipping([1], [2]), [9, 9])
    finally:
        HFTarget.commit = make
    assert 0 < stats.mean_accepted < 4
    plain = HFTarget(model, 2, 9 + NEW_TOKENS)
    plain.prefill(text[:, :-1], torch.full((2,), 9 + NEW_TOKENS - 1, dtype=torch.int32))
    assert kept[-1].prefix_len.tolist() == [9 + NEW_TOKENS - 1] * 2
    rows = slice(0, 9 + NEW_TOKENS - 1)
    torch.testing.assert_close(kept[-1].cache.buffers[:, :, :, rows], plain.cache.buffers[:, :, :, rows])
