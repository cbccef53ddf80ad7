"""Heads trained while the backbone runs: frozen, by LoRA, or all of it."""

import copy
import json
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F

from specdec_kernels.hf.load import load_model
from specdec_kernels.modules.medusa import MedusaHeads
from specdec_kernels.training import trainer as trainer_module
from specdec_kernels.training.backbone import Backbone, JointOptions, check_lora
from specdec_kernels.training.data import GenerationOptions, generate_conversations, is_held_out, read_conversations
from specdec_kernels.training.generate import Limits
from specdec_kernels.training.head_loss import HeadOptions
from specdec_kernels.training.hidden import by_length
from specdec_kernels.training.medusa import fresh_heads, train_medusa
from specdec_kernels.training.medusa_live import LiveLoss, measure_live
from specdec_kernels.training.trainer import TrainerOptions

HEADS = HeadOptions(num_heads=2, num_layers=1)
TRAINER = TrainerOptions(epochs=1, batch_size=4, lr=1e-2, log_every=4, save_every=6)
NUM_TOKENS = 600


def joint(**more):
    options = {"trainer": TrainerOptions(epochs=1, batch_size=4, lr=3e-3, log_every=4, save_every=6), "lora_rank": 0}
    return JointOptions(**{**options, **more})


@pytest.fixture(scope="module")
def texts(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    generate_conversations(folder, generation(tiny), num_tokens=NUM_TOKENS, num_slots=16)
    return folder


def generation(model, dtype="float32"):
    return GenerationOptions(model, None, dtype, 0, Limits(user_len=4, answer_len=12))


def train(model, texts, folder, *, dtype="float32", **more):
    if not (folder / "work").exists():
        shutil.copytree(texts, folder / "work")
        (folder / "work" / "generation.json").unlink()
    return train_medusa(
        folder / "out", folder / "work", generation(model, dtype), HEADS, TRAINER, num_tokens=NUM_TOKENS,
        on_the_fly=True, **more,
    )  # fmt: skip


def curve(folder, name="training_curve"):
    lines = [json.loads(line) for line in (folder / "out" / f"{name}.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def losses(folder, part=None):
    lines = [line for line in curve(folder) if "loss" in line]
    return [line["loss"] if part is None else line["head_losses"][part] for line in lines]


@pytest.fixture(params=["all weights", "lora"])
def rank(request):
    if request.param == "lora":
        pytest.importorskip("peft")
    return 4 if request.param == "lora" else 0


@pytest.mark.parametrize("soft_targets", [False, True])
@pytest.mark.parametrize("self_distillation", [False, True])
def test_joint_loss_is_the_formula(tiny, texts, rank, self_distillation, soft_targets):
    options = HeadOptions(2, 1, draft_vocab=20, soft_targets=soft_targets)
    conversations = by_length(read_conversations(texts))[-5:]
    original = load_model(tiny, torch.float32)
    tuning = joint(lora_rank=rank, self_distillation=self_distillation, weight=0.3)
    backbone = Backbone(load_model(tiny, torch.float32), tuning)
    torch.manual_seed(3)
    with torch.no_grad():  # somewhere on its way
        for parameter in backbone.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    heads = fresh_heads(options, read_conversations(texts), backbone.weight.detach())
    loss, parts = LiveLoss(heads, backbone, conversations, options, tuning)(torch.tensor([0, 3]))

    head_sums, lm_sum, count, counts = [0.0, 0.0], 0.0, 0, [0, 0]
    for c in (conversations[0], conversations[3]):
        ids = torch.tensor([c.prompt + c.answer])
        hidden = backbone.model.base_model(ids).last_hidden_state[0]
        with torch.no_grad():
            known = original.base_model(ids).last_hidden_state[0] @ original.get_output_embeddings().weight.T
        logprobs = (hidden @ backbone.weight.T).log_softmax(-1)
        for place, token in enumerate(c.answer, len(c.prompt) - 1):
            p = known[place].softmax(-1)
            kl = (p * (p.log() - logprobs[place])).sum()
            lm_sum, count = lm_sum + (kl if self_distillation else -logprobs[place, token]), count + 1
            root = backbone.model.get_input_embeddings().weight[token]
            drafted = heads.hidden_states(hidden[place][None], root[None])[0] @ heads.select_rows(backbone.weight).T
            for k in range(2):
                if place + 2 + k < ids.shape[1]:
                    target = heads.select_rows(known[place + 1 + k][:, None])[:, 0].softmax(-1)
                    label = (heads.vocab_map == ids[0, place + 2 + k]).nonzero()[:, 0]
                    if soft_targets:
                        head_sums[k], counts[k] = head_sums[k] + F.cross_entropy(drafted[k], target), counts[k] + 1
                    elif len(label):
                        head_sums[k], counts[k] = head_sums[k] + F.cross_entropy(drafted[k], label[0]), counts[k] + 1
    head_losses = [total / number for total, number in zip(head_sums, counts, strict=True)]
    expected = lm_sum / count + 0.3 * (0.8 * head_losses[0] + 0.64 * head_losses[1])
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert parts.tolist() == pytest.approx([x.item() for x in (lm_sum / count, *head_losses)], rel=1e-3, abs=1e-5)
    trained = [heads.w_res, *(p for p in backbone.module.parameters() if p.requires_grad)]
    for ours, theirs in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_frozen_backbone_gives_the_heads_of_stored_states(tiny, texts, tmp_path):
    """One step of all texts is the same step, whether their states come from disk or from the backbone."""
    results = []
    num_training = sum(not is_held_out(c) for c in read_conversations(texts))
    num_rows = sum(len(c.answer) - 1 for c in read_conversations(texts) if not is_held_out(c))
    for name, size in (("live", num_training), ("stored", num_rows)):
        shutil.copytree(texts, tmp_path / name)
        heads = train_medusa(
            tmp_path / f"{name}-out", tmp_path / name, generation(tiny), HEADS,
            TrainerOptions(epochs=1, batch_size=size, lr=1e-2), num_tokens=NUM_TOKENS, on_the_fly=name == "live",
        )  # fmt: skip
        results.append((heads, json.loads((tmp_path / f"{name}-out" / "accuracy.json").read_text())))
    (live, found), (stored, expected) = results
    torch.testing.assert_close(live.w_res, stored.w_res, rtol=1e-2, atol=1e-4)
    assert found["num_labels"] == expected["num_labels"]
    for ours, theirs in zip(found["heads"], expected["heads"], strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)
    assert not (tmp_path / "live" / "hidden").exists()


def test_medusa_2_trains_both_and_says_how_much_is_kept(tiny, texts, tmp_path, rank):
    options = TrainerOptions(epochs=3, batch_size=4, lr=3e-3, log_every=12, save_every=60)
    tuning = joint(lora_rank=rank, trainer=options, weight=1.0)
    heads = train(tiny, texts, tmp_path, joint=tuning)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    assert [line["loss"] for line in curve(tmp_path, "warm_up_curve") if "loss" in line]
    assert losses(tmp_path, 0)[0] < 0.3  # it began as the original
    model = load_model(tiny, torch.float32)
    if rank:
        from peft import PeftModel

        tuned = PeftModel.from_pretrained(model, tmp_path / "out" / "lora").merge_and_unload()
    else:
        tuned = load_model(str(tmp_path / "out" / "model"), torch.float32)
    original = load_model(tiny, torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(tuned.parameters(), original.parameters(), strict=True))
    held_out = [c for c in read_conversations(texts) if is_held_out(c)]
    loaded = MedusaHeads.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.w_res, heads.w_res)
    counter, _ = measure_live(loaded, Backbone(tuned), held_out)
    found = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    for ours, saved in zip(counter.accuracies(), found["heads"], strict=True):
        assert ours == pytest.approx(saved, abs=0.03)
    assert 0.5 < found["same_as_original"] <= 1


def test_interrupted_medusa_2_gives_the_same_losses(tiny, texts, tmp_path, monkeypatch, rank):
    tuning = joint(lora_rank=rank)
    whole = train(tiny, texts, tmp_path / "whole", joint=tuning)
    one_step = trainer_module.Trainer._one_step

    def stop(self):
        if self.folder.name == "joint" and self.step == 8:
            raise KeyboardInterrupt
        return one_step(self)

    monkeypatch.setattr(trainer_module.Trainer, "_one_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, texts, tmp_path / "cut", joint=tuning)
    monkeypatch.undo()
    resumed = train(tiny, texts, tmp_path / "cut", joint=tuning)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert torch.equal(resumed.w_res, whole.w_res)


def test_the_learning_rates_are_separate(tiny, texts, tmp_path, monkeypatch):
    rates = []
    one_step = trainer_module.Trainer._one_step

    def watched(self):
        numbers = one_step(self)
        if self.folder.name == "joint":
            rates.append({len(g["params"]): g["lr"] for g in self.optimizer.param_groups})
        return numbers

    monkeypatch.setattr(trainer_module.Trainer, "_one_step", watched)
    train(tiny, texts, tmp_path, joint=joint(head_rate=5.0), dtype="bfloat16")
    in_heads = len(list(MedusaHeads(2, 1, 32, 30, root_conditioned=True).parameters()))
    assert all(rate[in_heads] == pytest.approx(5 * min(rate.values())) for rate in rates)
    assert all(len(rate) == 2 for rate in rates)
    assert load_model(str(tmp_path / "out" / "model"), torch.bfloat16).dtype == torch.bfloat16


def test_a_frozen_backbone_is_left_as_it_is(tiny):
    model = load_model(tiny, torch.float32)
    before = copy.deepcopy(model.state_dict())
    backbone = Backbone(model)
    assert not any(p.requires_grad for p in backbone.module.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_missing_peft_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"specdec-kernels\[lora\]"):
        check_lora(JointOptions())
    check_lora(JointOptions(lora_rank=0))
    check_lora(None)
