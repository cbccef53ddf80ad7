"""Two processes, as `accelerate launch` starts them, train to what one process with the same steps trains to."""

import json
import os
import shutil
import socket
import sys

import pytest
import torch

from specdec_kernels.hf.load import load_model
from specdec_kernels.modules.kangaroo import KangarooAdapter, rope_of
from specdec_kernels.modules.medusa import MedusaHeads
from specdec_kernels.training.backbone import JointOptions
from specdec_kernels.training.data import GenerationOptions, generate_conversations, read_conversations
from specdec_kernels.training.generate import Limits
from specdec_kernels.training.kangaroo import AdapterOptions, train_kangaroo
from specdec_kernels.training.losses import linear_cross_entropy, mean_count
from specdec_kernels.training.medusa import HeadOptions, train_medusa
from specdec_kernels.training.processes import Processes
from specdec_kernels.training.trainer import Trainer, TrainerOptions

NUM_TOKENS = 500


def generation(model):
    return GenerationOptions(model, None, "float32", 0, Limits(user_len=4, answer_len=12))


def train(model, folder):
    """Train one of each; an odd number of rows, so the shares differ."""
    options = TrainerOptions(epochs=2, batch_size=5, lr=1e-2, log_every=5, save_every=7)
    train_kangaroo(
        folder / "adapter", folder / "work", generation(model), AdapterOptions(1, "attention", 12, alpha=0.5), options,
        num_tokens=NUM_TOKENS,
    )  # fmt: skip
    options = TrainerOptions(epochs=1, batch_size=33, lr=1e-2, log_every=5, save_every=7)
    train_medusa(
        folder / "heads", folder / "medusa", generation(model), HeadOptions(num_heads=2, num_layers=1), options,
        num_tokens=NUM_TOKENS,
    )  # fmt: skip
    options = TrainerOptions(epochs=0.5, batch_size=5, lr=1e-3, log_every=2, save_every=5)
    train_medusa(
        folder / "joint", folder / "medusa_2", generation(model), HeadOptions(num_heads=2, num_layers=1), options,
        joint=JointOptions(options, lora_rank=0), on_the_fly=True, num_tokens=NUM_TOKENS,
    )  # fmt: skip


def one_of_two(rank, port, model, folder):
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )  # fmt: skip
    generate_conversations(folder / "texts", generation(model), num_tokens=60, num_slots=2)
    train(model, folder)


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    pytest.importorskip("accelerate")
    root = tmp_path_factory.mktemp("processes")
    generate_conversations(root / "work", generation(tiny), num_tokens=NUM_TOKENS, num_slots=16)
    for place in ("one/work", "one/medusa", "one/medusa_2", "two/work", "two/medusa", "two/medusa_2"):
        shutil.copytree(root / "work", root / place)
    train(tiny, root / "one")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two, (port, tiny, root / "two"), nprocs=2)
    return root / "one", root / "two"


@pytest.mark.parametrize("kind", ["adapter", "heads", "joint"])
def test_losses_and_measurements_are_those_of_one_process(folders, kind):
    curves = [
        [json.loads(line) for line in (folder / kind / "training_curve.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    assert len(curves[0]) == len(curves[1]) > 4
    for one, two in zip(*curves, strict=True):
        assert one.keys() == two.keys()
        for key in one.keys() - {"seconds"}:
            is_share = key in ("held_out_top1", "same_as_original")
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=5e-3 if is_share else 1e-5)


def test_weights_are_those_of_one_process(folders, tiny):
    rope = rope_of(load_model(tiny, torch.float32))
    adapters = [KangarooAdapter.from_pretrained(folder / "adapter", rope).state_dict() for folder in folders]
    heads = [MedusaHeads.from_pretrained(folder / "heads").state_dict() for folder in folders]
    tuned = [load_model(str(folder / "joint" / "model"), torch.float32).state_dict() for folder in folders]
    for one, two in (adapters, heads, tuned):
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)


def test_each_process_writes_its_share_of_the_texts(folders):
    folder = folders[1] / "texts"
    files = sorted(folder.glob("conversations-*.jsonl"))
    parities = [{json.loads(line)["index"] % 2 for line in file.read_text().split()} for file in files]
    assert parities == [{0}, {1}]
    assert sum(len(c.answer) for c in read_conversations(folder)) >= 60


@pytest.mark.parametrize(("count", "end"), [(1, ""), (2, ", in 2 processes")])
def test_how_many_train_together_is_said(count, end):
    said = Processes(0, count).announcement(torch.nn.Linear(1999, 1), 5000)
    assert said == f"training 2,000 parameters on 5,000 texts{end}"


def test_shares_make_up_the_rows():
    rows = torch.arange(7)
    shares = [Processes(i, 3).share(rows) for i in range(3)]
    assert torch.equal(torch.cat(shares).sort().values, rows)
    assert {len(share) for share in shares} == {2, 3}


def test_the_mean_loss_of_two_shares_is_the_loss_of_all(monkeypatch):
    x, weight, labels = torch.randn(9, 6), torch.randn(8, 6), torch.randint(8, (9,))
    labels[[1, 2, 4, 8]] = -100
    shares = [Processes(i, 2).share(torch.arange(9)) for i in range(2)]
    counts = [(labels[share] >= 0).sum().float() for share in shares]
    assert counts[0] != counts[1]
    monkeypatch.setattr(Processes, "mean", lambda self, value: sum(counts) / 2)
    parts = [
        linear_cross_entropy(x[share], weight, labels[share], num_labels=mean_count(labels[share], Processes(0, 2)))
        for share in shares
    ]
    torch.testing.assert_close(sum(parts) / 2, linear_cross_entropy(x, weight, labels))


def test_more_processes_than_rows_in_a_step_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Processes, "current", classmethod(lambda cls, device="cpu": cls(0, 4)))
    with pytest.raises(ValueError, match="3 rows in a step are too few for 4 processes"):
        Trainer(torch.nn.Linear(1, 1), None, torch.arange(9), TrainerOptions(batch_size=3), tmp_path)


def test_a_launcher_without_accelerate_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match="pip install accelerate"):
        Processes.current()
