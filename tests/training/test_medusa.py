import json
import shutil

import pytest
import torch

from specdec_kernels.hf.load import load_model
from specdec_kernels.modules.medusa import MedusaHeads
from specdec_kernels.training import trainer as trainer_module
from specdec_kernels.training.calibrate import measure_accuracies
from specdec_kernels.training.data import GenerationOptions, is_held_out, read_conversations
from specdec_kernels.training.generate import Conversation, Limits
from specdec_kernels.training.hidden import HiddenStates, cache_hidden_states
from specdec_kernels.training.medusa import HeadOptions, frequent_tokens, fresh_heads, train_heads, train_medusa
from specdec_kernels.training.trainer import TrainerOptions

TRAINER = TrainerOptions(epochs=5, batch_size=64, lr=1e-2, log_every=10, save_every=20)


def generation(model: str, dtype: str = "float32") -> GenerationOptions:
    return GenerationOptions(model, None, dtype, 0, Limits(user_len=4, answer_len=12))


def train(model, folder, *, options=None, dtype="float32", out="out", num_tokens=900):
    options = options or HeadOptions(num_heads=2, num_layers=2)
    return train_medusa(
        folder / out, folder / "work", generation(model, dtype), options, TRAINER,
        num_tokens=num_tokens, num_slots=16, command="the command",
    )  # fmt: skip


def losses(folder, out="out"):
    lines = [json.loads(line) for line in (folder / out / "training_curve.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(tiny, folder)


def test_training_lowers_the_loss(trained):
    curve = losses(trained[0])
    assert curve[-1] < 0.95 * curve[0]


@pytest.mark.parametrize("soft_targets", [False, True])
def test_heads_learn_what_can_be_learnt(tmp_path, soft_targets):
    """Answers walk through a fixed permutation, so each head's token is a function of the hidden state."""
    torch.manual_seed(5)
    successor, embedding = torch.randperm(12).tolist(), torch.randn(12, 32)
    items = []
    for index in range(120):
        answer = [index % 12]
        for _ in range(10):
            answer.append(successor[answer[-1]])
        items.append(Conversation(index, (1, index), tuple(answer), True))
    pending = torch.tensor([t for c in items for t in c.answer])
    states = HiddenStates(embedding[pending] + 0.1 * torch.randn(len(pending), 32), items)
    heads = MedusaHeads(3, 2, 32, 12)
    held_out = states.rows(held_out=True)
    before = measure_accuracies(heads, embedding, states, held_out).accuracies()
    options = TrainerOptions(epochs=20, batch_size=128, lr=1e-2)
    train_heads(heads, embedding, states, tmp_path, HeadOptions(3, 2, soft_targets=soft_targets), options)
    after = measure_accuracies(heads, embedding, states, held_out).accuracies()
    assert all(row[0] < 0.3 for row in before)
    assert all(row[0] > 0.9 for row in after)


@pytest.mark.parametrize("root_conditioned", [False, True])
def test_root_conditioned_heads_learn_from_the_pending_token(tmp_path, root_conditioned):
    """The states are noise; only the pending token says what follows it."""
    torch.manual_seed(5)
    successor, embedding = torch.randperm(12), torch.randn(12, 32)
    answers = torch.arange(120)[:, None] % 12
    for _ in range(10):
        answers = torch.cat([answers, successor[answers[:, -1:]]], dim=1)
    items = [Conversation(index, (1, index), tuple(answer), True) for index, answer in enumerate(answers.tolist())]
    states = HiddenStates(torch.randn(answers.numel(), 32), items, embedding)
    heads = MedusaHeads(2, 1, 32, 12, root_conditioned=root_conditioned)
    train_heads(
        heads, embedding, states, tmp_path, HeadOptions(2, 1), TrainerOptions(epochs=20, batch_size=128, lr=1e-2)
    )
    found = measure_accuracies(heads, embedding, states, states.rows(held_out=True)).accuracies()
    assert all(row[0] > 0.9 if root_conditioned else row[0] < 0.3 for row in found)


def test_roots_are_the_embeddings_of_the_pending_tokens():
    items = [Conversation(0, (1, 2), (3, 5, 4), True)]
    embedding = torch.randn(6, 2)
    states = HiddenStates(torch.zeros(3, 2), items, embedding)
    assert torch.equal(states.roots(torch.tensor([2, 0])), embedding[[4, 3]])
    with pytest.raises(ValueError, match="need the embeddings"):
        HiddenStates(torch.zeros(3, 2), items).roots(torch.tensor([0]))


def cached(folder, conversations, model):
    return cache_hidden_states(folder / "work" / "hidden", conversations, model, hidden_size=32, dtype=torch.float32)


def measure(heads, model, states):
    weight = model.get_output_embeddings().weight.detach()
    return measure_accuracies(heads, weight, states, states.rows(held_out=True)).accuracies()


def test_saved_accuracies_are_those_of_the_saved_heads(trained, tiny):
    folder, _ = trained
    found = json.loads((folder / "out" / "accuracy.json").read_text())
    heads = MedusaHeads.from_pretrained(folder / "out").requires_grad_(False)
    model = load_model(tiny, torch.float32)
    conversations = read_conversations(folder / "work")
    states = cached(folder, conversations, model)
    assert measure(heads, model, states) == found["heads"]
    assert [len(row) for row in found["heads"]] == [10, 10]
    assert found["command"] == "the command"
    assert found["held_out_tokens"] == sum(len(c.answer) - 1 for c in conversations if is_held_out(c))
    assert found["training_tokens"] == sum(len(c.answer) - 1 for c in conversations if not is_held_out(c))
    assert found["projection_rows"] == found["vocab_size"] == 30
    assert all(sum(row) <= 1 for row in found["heads"] + found["greedy_heads"])


def test_same_command_again_repeats_nothing(trained, tiny, monkeypatch):
    folder, heads = trained
    monkeypatch.setattr(trainer_module.Trainer, "_one_step", lambda self: pytest.fail("trained again"))
    again = train(tiny, folder, out="again")
    assert torch.equal(again.w_res, heads.w_res)
    assert losses(folder, "again") == losses(folder)


def test_interrupted_training_gives_the_same_heads(trained, tiny, tmp_path, monkeypatch):
    folder, heads = trained
    one_step = trainer_module.Trainer._one_step

    def stop_at_30(self):
        if self.step == 30:
            raise KeyboardInterrupt
        return one_step(self)

    shutil.copytree(folder / "work", tmp_path / "work", ignore=shutil.ignore_patterns("training"))
    monkeypatch.setattr(trainer_module.Trainer, "_one_step", stop_at_30)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path)
    monkeypatch.undo()
    resumed = train(tiny, tmp_path)
    assert torch.equal(resumed.w_res, heads.w_res)
    assert losses(tmp_path) == losses(folder)


def test_bf16_reduced_vocabulary_and_own_projection(tiny, tmp_path):
    options = HeadOptions(num_heads=3, num_layers=1, own_projection=True, draft_vocab=12)
    heads = train(tiny, tmp_path, options=options, dtype="bfloat16", num_tokens=300)
    loaded = MedusaHeads.from_pretrained(tmp_path / "out")
    assert loaded.w_out.shape == (3, 12, 32)
    assert loaded.w_out.dtype == torch.bfloat16
    assert torch.equal(loaded.vocab_map, heads.vocab_map)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_fresh_heads_predict_what_the_model_predicts(tiny):
    lm_head = load_model(tiny, torch.float32).get_output_embeddings().weight.detach()
    hidden = torch.randn(5, 32)
    for own, conditioned in ((False, True), (True, False)):
        options = HeadOptions(3, 2, own_projection=own, root_conditioned=conditioned)
        heads = fresh_heads(options, [], lm_head)
        logits = heads(hidden, None if own else lm_head, torch.randn(5, 32) if conditioned else None)
        torch.testing.assert_close(logits, (hidden @ lm_head.T)[:, None].expand(5, 3, 30))


def test_frequent_tokens_count_answers_and_prefer_low_ids():
    items = [Conversation(0, (9, 9, 9, 9), (5, 5, 7, 7, 2), True)]
    assert frequent_tokens(items, 4, 10).tolist() == [0, 2, 5, 7]
    assert frequent_tokens(items, 99, 10).tolist() == list(range(10))


def test_draft_vocabulary_is_chosen_without_the_held_out_text(monkeypatch):
    monkeypatch.setattr("specdec_kernels.training.medusa.is_held_out", lambda c: c.index == 1)
    items = [Conversation(0, (1,), (5, 6), True), Conversation(1, (1,), (8, 8, 8), True)]
    assert fresh_heads(HeadOptions(draft_vocab=2), items, torch.zeros(10, 4)).vocab_map.tolist() == [5, 6]


def test_gradients_are_those_of_the_plain_loss(tmp_path):
    """One SGD-like step: the sign of AdamW's first update is the sign of the plain formula's gradient."""
    torch.manual_seed(4)
    items = [Conversation(i, (1, i), tuple(torch.randint(0, 20, (9,)).tolist()), True) for i in range(12)]
    states = HiddenStates(torch.randn(108, 16), items)
    lm_head = torch.randn(20, 16)
    heads = MedusaHeads(2, 1, 16, 20)
    plain = MedusaHeads(2, 1, 16, 20)
    rows = states.rows(held_out=False)
    logits, labels = plain(states.hidden[rows], lm_head), states.labels(rows, 2)
    loss = sum(
        0.8 ** (k + 1) * torch.nn.functional.cross_entropy(logits[:, k], labels[:, k], ignore_index=-100)
        for k in range(2)
    )
    (gradient,) = torch.autograd.grad(loss, [plain.w_res])
    options = TrainerOptions(epochs=1, batch_size=len(rows), lr=1e-2)
    train_heads(heads, lm_head, states, tmp_path, HeadOptions(2, 1), options)
    clear = gradient.abs() > 1e-6
    assert clear.float().mean() > 0.9
    assert torch.equal(heads.w_res.detach().sign()[clear], -gradient.sign()[clear])


def test_too_little_text_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"no (training|held-out) conversations"):
        train_medusa(
            tmp_path / "out", tmp_path / "work", generation(tiny), HeadOptions(), TRAINER, num_tokens=1, num_slots=1
        )
