import json
import math

import pytest
import torch
from torch import nn

from specdec_kernels.training.trainer import RowOrder, Trainer, TrainerOptions, learning_rate

OPTIONS = TrainerOptions(epochs=3, batch_size=4, lr=0.1, log_every=4, save_every=3)
TARGETS = torch.arange(26.0).reshape(26, 1).sin()


def trainer(folder, options=OPTIONS, **more):
    torch.manual_seed(7)
    module = nn.Linear(1, 1)

    def loss_of(rows):
        loss = (module(rows[:, None] / 26.0) - TARGETS[rows]).square().mean()
        return loss, torch.stack([loss.detach(), loss.detach() * 2])

    return Trainer(module, loss_of, torch.arange(26), options, folder, **more)


def curve(folder):
    lines = [json.loads(line) for line in (folder / "training_curve.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_schedule_warms_up_and_falls_to_the_floor():
    options = TrainerOptions(lr=2.0, warmup=0.1, final_lr=0.05)
    rates = [learning_rate(step, 100, options) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(2.0 * (0.05 + 0.95 * 0.5))
    assert rates[99] == pytest.approx(2.0 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * 89 / 90))))
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_every_epoch_sees_other_batches_of_all_rows():
    order = RowOrder(torch.arange(100, 120), batch_size=5, seed=1)
    epochs = [torch.cat([order[4 * epoch + i] for i in range(4)]).tolist() for epoch in range(2)]
    assert [sorted(e) for e in epochs] == [list(range(100, 120))] * 2
    assert epochs[0] != epochs[1]
    again = RowOrder(torch.arange(100, 120), batch_size=5, seed=1)
    assert again[5].tolist() == order[5].tolist() == epochs[1][5:10]
    assert RowOrder(torch.arange(3), batch_size=8, seed=0).steps_per_epoch == 1


def test_training_lowers_the_loss_and_writes_the_curve(tmp_path):
    run = trainer(tmp_path, evaluate=lambda: {"held_out": [0.5]})
    run.run()
    assert run.step == run.num_steps == 18
    lines = curve(tmp_path)
    losses = [line for line in lines if "loss" in line]
    assert [line["step"] for line in losses] == [4, 8, 12, 16, 18]
    assert [line["step"] for line in lines if "held_out" in line] == [3, 6, 9, 12, 15, 18]
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert "head 2" in (tmp_path / "training_curve.svg").read_text()
    assert losses[0]["head_losses"] == pytest.approx([losses[0]["loss"], 2 * losses[0]["loss"]], rel=1e-4)


# At a checkpoint; past one, so that a step is done again; and so far past it that a line of the curve is written again.
@pytest.mark.parametrize("stop_after", [6, 7, 8])
def test_resumed_run_gives_the_same_losses_and_weights(tmp_path, stop_after):
    whole = trainer(tmp_path / "whole")
    whole.run()
    first = trainer(tmp_path / "cut")
    first.run(stop_after=stop_after)
    resumed = trainer(tmp_path / "cut")
    resumed.module.weight.data.zero_()
    resumed.run()
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert torch.equal(resumed.module.weight, whole.module.weight)


def test_finished_run_is_not_repeated(tmp_path):
    trainer(tmp_path).run()
    before = curve(tmp_path)
    trainer(tmp_path).run()
    assert curve(tmp_path) == before


def test_checkpoint_of_other_options_is_refused(tmp_path):
    trainer(tmp_path).run(stop_after=3)
    other = TrainerOptions(**{**vars(OPTIONS), "lr": 0.2})
    with pytest.raises(ValueError, match=r"made with another lr \(0.\d+, now 0.2\); remove it"):
        trainer(tmp_path, other).run()
    with pytest.raises(ValueError, match=r"made with another soft_targets \(None, now True\)"):
        trainer(tmp_path, task={"soft_targets": True}).run()


def test_an_option_that_came_later_and_is_not_used_changes_nothing(tmp_path):
    trainer(tmp_path, task={"decay": 0.8}).run(stop_after=3)
    with pytest.raises(ValueError, match=r"made with another init \(None, now folder\)"):
        trainer(tmp_path, task={"decay": 0.8, "init": "folder"}).run()
    again = trainer(tmp_path, task={"decay": 0.8, "init": None})
    again.run()
    assert again.step == again.num_steps
