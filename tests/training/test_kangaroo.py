import json
import shutil

import pytest
import torch

from specdec_kernels.hf.load import load_model
from specdec_kernels.modules.kangaroo import KangarooAdapter, rope_of
from specdec_kernels.training import trainer as trainer_module
from specdec_kernels.training.data import GenerationOptions, read_conversations
from specdec_kernels.training.generate import Limits
from specdec_kernels.training.kangaroo import (
    AdapterLoss,
    AdapterOptions,
    fresh_adapter,
    measure_agreement,
    train_kangaroo,
)
from specdec_kernels.training.sequences import LiveStates, split, store_states
from specdec_kernels.training.trainer import TrainerOptions

TRAINER = TrainerOptions(epochs=3, batch_size=4, lr=1e-2, log_every=5, save_every=10)
EXIT = AdapterOptions(exit_layer=1, kind="attention")


def train(model, folder, *, options=EXIT, dtype="float32", out="out", **more):
    generation = GenerationOptions(model, None, dtype, 0, Limits(user_len=4, answer_len=12))
    return train_kangaroo(
        folder / out, folder / "work", generation, options, TRAINER,
        num_tokens=700, num_slots=16, command="the command", **more,
    )  # fmt: skip


def losses(folder, out="out"):
    lines = [json.loads(line) for line in (folder / out / "training_curve.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(tiny, folder)


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny, torch.float32)


def weight_of(model):
    return model.get_output_embeddings().weight.detach()


def test_training_lowers_the_loss_and_raises_the_agreement(trained, model):
    folder, adapter = trained
    curve = losses(folder)
    assert curve[-1] < curve[0]
    states = LiveStates(read_conversations(folder / "work"), model, 1)
    held_out = split(states)[1].tolist()
    before = measure_agreement(fresh_adapter(EXIT, states.conversations, model), weight_of(model), states, held_out)
    after = measure_agreement(adapter, weight_of(model), states, held_out)
    assert after.accuracies()[0][0] > before.accuracies()[0][0]
    found = json.loads((folder / "out" / "accuracy.json").read_text())
    assert found["heads"] == after.accuracies()
    assert found["held_out_tokens"] == sum(len(states.conversations[i].answer) for i in held_out)
    assert (found["command"], found["exit_layer"], found["kind"]) == ("the command", 1, "attention")


def test_states_are_the_models_own_stored_or_live(trained, model, tmp_path, capsys):
    conversations = read_conversations(trained[0] / "work")[:9]
    stored = store_states(tmp_path, conversations, model, 1, dtype=torch.float32, max_tokens=50)
    rows = sum(len(c.prompt) + len(c.answer) - 1 for c in conversations)
    assert f"{rows} rows × 64 × 4 bytes" in capsys.readouterr().out
    live = LiveStates(conversations, model, 1)
    for states in (stored, live):
        batch = states.batch([0, 8, 3])
        for row, index in enumerate([0, 8, 3]):
            c = states.conversations[index]
            ids = torch.tensor([c.prompt + c.answer])
            with torch.no_grad():
                expected = model(ids[:, :-1], output_hidden_states=True).hidden_states
            length = ids.shape[1] - 1
            torch.testing.assert_close(batch.exit[row, :length], expected[1][0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(batch.final[row, :length], expected[-1][0], atol=1e-5, rtol=1e-4)
            assert batch.is_token[row].tolist() == [i < length for i in range(batch.is_token.shape[1])]
            assert batch.next_ids[row][batch.is_answer[row]].tolist() == list(c.answer)
            assert batch.next_ids[row, :length].tolist() == ids[0, 1:].tolist()


@pytest.mark.parametrize("draft_vocab", [0, 12])
@pytest.mark.parametrize(
    "more", [{}, {"alpha": 1.0}, {"alpha": 0.3, "target_temperature": 0.5, "draft_temperature": 2.0}], ids=str
)
def test_loss_is_the_formula(trained, model, more, draft_vocab):
    conversations = read_conversations(trained[0] / "work")[:9]
    options = AdapterOptions(1, "attention", draft_vocab, answers_only=True, **more)
    states = LiveStates(conversations, model, 1)
    adapter = fresh_adapter(options, conversations, model)
    loss, parts = AdapterLoss(adapter, weight_of(model), states, options)(torch.tensor([2, 5]))
    batch = states.batch([2, 5])
    weight = adapter.select_rows(weight_of(model))
    logits = (adapter(batch.exit) @ weight.T)[batch.is_answer]
    target = ((batch.final @ weight.T)[batch.is_answer] / options.target_temperature).softmax(-1)
    soft = -(target * (logits / options.draft_temperature).log_softmax(-1)).sum(-1).mean()
    kept = list(range(30)) if adapter.vocab_map is None else adapter.vocab_map.tolist()
    labels = torch.tensor([kept.index(t) if t in kept else -100 for t in batch.next_ids[batch.is_answer].tolist()])
    hard = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, (1 - options.alpha) * soft + options.alpha * hard)
    assert parts.tolist() == pytest.approx(
        [soft.item() if options.alpha < 1 else 0, hard.item() if options.alpha else 0], rel=1e-4
    )
    gradient = torch.autograd.grad(loss, adapter.q_proj.weight)[0]
    expected = torch.autograd.grad((1 - options.alpha) * soft + options.alpha * hard, adapter.q_proj.weight)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-3)


def test_users_turns_are_learnt_from_but_not_the_template(trained, model):
    conversations = read_conversations(trained[0] / "work")[:9]
    states = LiveStates(conversations, model, 1)
    loss = AdapterLoss(fresh_adapter(EXIT, conversations, model), weight_of(model), states, EXIT)
    batch = states.batch([4])
    learnt = loss._learnt(batch)[0].nonzero()[:, 0].tolist()
    c = states.conversations[4]
    common = len([1 for ids in zip(*(c.prompt for c in conversations), strict=False) if len(set(ids)) == 1])
    assert common >= 2
    assert learnt[0] >= 1
    assert learnt == list(range(learnt[0], len(c.prompt) + len(c.answer) - 1))
    assert len(learnt) > len(c.answer)


@pytest.mark.parametrize("on_the_fly", [False, True])
def test_interrupted_training_gives_the_same_adapter(trained, tiny, tmp_path, monkeypatch, on_the_fly):
    folder, adapter = trained
    one_step = trainer_module.Trainer._one_step

    def stop_at_13(self):
        if self.step == 13:
            raise KeyboardInterrupt
        return one_step(self)

    shutil.copytree(folder / "work", tmp_path / "work", ignore=shutil.ignore_patterns("training", "hidden"))
    monkeypatch.setattr(trainer_module.Trainer, "_one_step", stop_at_13)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path, on_the_fly=on_the_fly)
    monkeypatch.undo()
    resumed = train(tiny, tmp_path, on_the_fly=on_the_fly)
    assert (tmp_path / "work" / "hidden").exists() != on_the_fly
    if on_the_fly:  # batches are padded differently there, which moves the last bits
        assert losses(tmp_path) == pytest.approx(losses(folder), rel=1e-3)
    else:
        assert torch.equal(resumed.q_proj.weight, adapter.q_proj.weight)
        assert losses(tmp_path) == losses(folder)


def test_bf16_attention_alone_and_a_reduced_vocabulary(trained, tiny, tmp_path):
    options = AdapterOptions(1, kind="attention", draft_vocab=12, alpha=0.5)
    adapter = train(tiny, tmp_path, options=options, dtype="bfloat16")
    loaded = KangarooAdapter.from_pretrained(tmp_path / "out", rope_of(load_model(tiny, torch.bfloat16)))
    assert loaded.intermediate_size is None
    assert loaded.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.vocab_map, adapter.vocab_map)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_a_fresh_adapter_is_the_last_layer(model):
    adapter = fresh_adapter(AdapterOptions(1), [], model)
    layer = model.model.layers[-1]
    assert torch.equal(adapter.q_proj.weight, layer.self_attn.q_proj.weight)
    assert torch.equal(adapter.down_proj.weight, layer.mlp.down_proj.weight)
    assert torch.equal(adapter.norm.weight, model.model.norm.weight)
    assert torch.equal(adapter.inv_freq, model.model.rotary_emb.inv_freq)


def test_training_goes_on_from_an_adapter_with_any_vocabulary(trained, model):
    folder, adapter = trained
    states = LiveStates(read_conversations(folder / "work"), model, 1)
    options = AdapterOptions(1, kind="attention", draft_vocab=12, init=str(folder / "out"))
    further = fresh_adapter(options, states.conversations, model)
    assert len(further.vocab_map) == 12
    for name, parameter in adapter.named_parameters():
        assert torch.equal(further.get_parameter(name), parameter), name
    with pytest.raises(ValueError, match=r"of other shapes: .*gate_proj.weight \(none\), wanted \(48, 32\)"):
        fresh_adapter(AdapterOptions(1, kind="layer", init=str(folder / "out")), states.conversations, model)
    with pytest.raises(FileNotFoundError):
        fresh_adapter(AdapterOptions(1, init=str(folder / "nowhere")), states.conversations, model)


def test_an_adapter_to_go_on_from_is_of_the_same_layer_if_it_says_so(trained, model, tmp_path):
    shutil.copytree(trained[0] / "out", tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    options = AdapterOptions(1, kind="attention", init=str(file.parent))
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"exit_layer": 2}))
    with pytest.raises(ValueError, match="is behind layer 2, wanted 1"):
        fresh_adapter(options, [], model)
    file.write_text(json.dumps({name: value for name, value in config.items() if name != "exit_layer"}))
    assert torch.equal(fresh_adapter(options, [], model).q_proj.weight, trained[1].q_proj.weight)


def test_the_last_layer_after_all_others_is_the_model_itself(trained, model):
    states = LiveStates(read_conversations(trained[0] / "work"), model, 1)
    adapter = fresh_adapter(AdapterOptions(1), states.conversations, model)
    counter = measure_agreement(adapter, weight_of(model), states, range(20))
    assert counter.accuracies()[0][0] == 1
    assert counter.totals.tolist() == [sum(len(c.answer) for c in states.conversations[:20])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AdapterOptions(2), r"exit_layer must be in \[1, 1\], got 2"),
        (AdapterOptions(0), r"exit_layer must be in \[1, 1\], got 0"),
        (AdapterOptions(1, kind="mlp"), "must be one of layer, attention, got mlp"),
    ],
)
def test_rejects(model, options, message):
    with pytest.raises(ValueError, match=message):
        fresh_adapter(options, [], model)
