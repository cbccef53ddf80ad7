"""`benchmarks.e2e.likely`: what is counted, and its table."""

import json

import pytest

from benchmarks.e2e import likely
from specdec_kernels.decoding.drafters import NGramDrafter
from tests.hf.tiny import tiny_model


def test_settings_take_turns_and_are_compared_with_plain_decoding():
    model = tiny_model("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    prompts = [[5, 6, 5, 6, 7, 5], [9, 8, 9]]
    drafters = {("ngram", p): NGramDrafter(max_drafts=6, min_prob=p) for p in (0.0, 0.9)}
    plain, whole, nothing = likely.measure(model, prompts, drafters, 20)
    assert (plain.drafter, plain.min_prob, plain.over_plain, plain.tokens_per_step, plain.nodes) == (
        "plain", None, 1.0, 1.0, 1.0
    )  # fmt: skip
    assert whole.nodes > 1.5
    assert whole.tokens_per_step >= nothing.tokens_per_step == nothing.nodes == 1.0
    assert min(whole.over_plain, whole.step_ms - whole.rest_ms, whole.rest_ms) > 0


def test_the_table(tmp_path):
    rows = [
        likely.Setting("plain", None, 1.0, 1.0, 1.0, 9.5, 0.45),
        likely.Setting("ngram", 0.0, 1.25, 1.5, 7.04, 11.04, 0.5),
    ]
    rows.append(likely.Setting("ngram", 0.06, 1.375, 1.25, 4.25, 10.0, 1.0))
    path = tmp_path / "likely.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [{"machine": {}}, *map(vars, rows)]))
    assert likely.markdown(path)[2:] == [
        "| plain | - | 1.0 | 1.00 | 9.5 | 0.45 | 1.00 |",
        "| ngram | all | 7.0 | 1.50 | 11.0 | 0.50 | 1.25 |",
        "| ngram | 0.06 | 4.2 | 1.25 | 10.0 | 1.00 | 1.38 |",
    ]


def test_speeds_are_compared_prompt_by_prompt():
    plain, own = likely.Clock(), likely.Clock()
    plain.speeds, own.speeds = [1.0, 4.0], [4.0, 4.0]
    assert own.over(plain) == pytest.approx(2.0)
