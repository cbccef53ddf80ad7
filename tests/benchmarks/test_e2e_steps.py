"""`benchmarks.e2e.steps`: parts of a step, and its result file."""

import json

import torch

from benchmarks.e2e import steps
from tests.hf.tiny import tiny_model
from tests.marks import needs_native


@needs_native
def test_parts_of_a_step_are_the_calls_of_every_layer(monkeypatch) -> None:
    model = tiny_model("llama", head_dim=16).bfloat16()
    counted = {}
    of = steps.RecordedCalls.of

    def counting(self, names):
        counted[names] = len(of(self, names))
        return of(self, names)

    monkeypatch.setattr(steps.RecordedCalls, "of", counting)
    (step,) = steps.measure(model, [3], 8, 1)
    layers = model.config.num_hidden_layers
    # q k v, o and down are `linear`, and so is the vocabulary projection; gate and up are one.
    assert counted == {steps.PARTS["linear"]: 4 * layers + 1, steps.PARTS["attention"]: layers}
    assert min(step.model_us, step.ours_us, step.linear_us, step.attention_us) > 0
    assert step.rest_us == step.prepared_us - step.linear_us - step.attention_us


def test_calls_made_again_give_what_they_gave() -> None:
    from specdec_kernels import linear

    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    with torch.no_grad(), steps.RecordedCalls() as calls:
        y = linear(x, [weight])
        torch.add(y, 1)
    (again,) = calls.of(["linear"])
    assert torch.equal(again(), y)


def test_a_result_file_begins_with_its_command(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["steps", "--save", "--model", "/some/where/m"])
    step = steps.Step(1, 256, 5.0, 4.0, 3.0, 2.0, 0.5)
    steps.save(tmp_path / "a" / "steps.jsonl", "m", [step])
    head, line = map(json.loads, (tmp_path / "a" / "steps.jsonl").read_text().splitlines())
    assert head["command"] == "python -m benchmarks.e2e.steps --save --model m"
    assert steps.Step(**line) == step
    assert steps.markdown(tmp_path / "a" / "steps.jsonl")[2:] == ["| 1 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 20 % |"]
