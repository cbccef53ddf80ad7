"""``specdec-kernels calibrate``, from nothing to a budget."""

import json
import shutil
import warnings

import pytest
import torch

from specdec_kernels import DraftTree
from specdec_kernels.cli.__main__ import main
from specdec_kernels.cli._arguments import load_errors
from specdec_kernels.cli.calibrate import print_table
from specdec_kernels.decoding.budget import CostTable
from specdec_kernels.decoding.calibration import Calibration, Setting, file_of
from specdec_kernels.decoding.drafters import KangarooDrafter
from specdec_kernels.hf._budgets import budget_of
from specdec_kernels.hf.load import load_model
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.training.calibrate import save_accuracies
from specdec_kernels.training.kangaroo import AdapterOptions, fresh_adapter

from ..training.tiny import VOCAB, save_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    MedusaHeads(2, 1, 32, len(VOCAB)).save_pretrained(folder / "heads")
    DraftTree.from_choices([[0], [1], [0, 0]]).save(folder / "heads" / "tree.json")
    return save_tiny_model(folder / "model"), folder / "heads"


def test_steps_then_drafters(folders, tmp_path, capsys):
    model, heads = folders
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["w1 w2 w3 w1 w2"]}\n{"prompt": "w4 w5"}\n')
    threads = torch.get_num_threads()
    common = ["calibrate", "--model", model, "--heads", str(heads), "--dtype", "float32", "--threads", str(threads)]
    sizes = ["--batch-sizes", "1", "2", "--contexts", "16", "--nodes", "1", "2", "4", "--repeats", "1"]
    assert main([*common, *sizes]) == 0
    setting = Setting.here(torch.device("cpu"), torch.float32, prepared=False)
    steps = Calibration.load(heads, setting)
    assert [point[:3] for point in steps.steps.points] == [(b, 16, t) for b in (1, 2) for t in (1, 2, 4)]
    assert steps.drafters == {}
    assert steps.metadata["command"].startswith("specdec-kernels calibrate --model model --heads heads")
    drafters = ["--keep-steps", "--drafter", "medusa", "ngram", "--prompts", str(tmp_path / "prompts.jsonl")]
    capsys.readouterr()
    assert main([*common, *sizes, *drafters, "--max-new-tokens", "8"]) == 0
    found = Calibration.load(heads, setting)
    assert found.steps.points == steps.steps.points
    assert set(found.drafters) == {"medusa", "ngram"}
    assert len(found.drafters["medusa"].gains) == 4
    assert found.budget("medusa").choose(1, 16) in (1, 2, 3, 4)
    out = capsys.readouterr().out
    assert "medusa\n  rows  nodes  tokens/step" in out
    assert str(tmp_path) not in file_of(heads, setting.device).read_text()
    assert len(json.loads(file_of(heads, setting.device).read_text())["calibrations"]) == 1


def test_an_adapter_has_its_calibration_beside_it(folders, tmp_path, capsys):
    """For a model without heads, too; and there `budget="auto"` finds it."""
    name, _ = folders
    model = load_model(name, torch.float32)
    fresh_adapter(AdapterOptions(exit_layer=1), [], model).save_pretrained(tmp_path / "adapter")
    command = ["calibrate", "--model", name, "--adapter", str(tmp_path / "adapter"), "--drafter", "kangaroo-tree"]
    sizes = ["--batch-sizes", "1", "--contexts", "16", "--nodes", "1", "2", "--repeats", "1", "--max-new-tokens", "4"]
    assert main([*command, *sizes, "--dtype", "float32"]) == 0
    drafter = KangarooDrafter.from_pretrained(tmp_path / "adapter", model, tree=DraftTree.chain(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert budget_of("auto", model, drafter) is not None
    with pytest.raises(SystemExit, match="there are no heads shipped for"):
        main(["calibrate", "--model", name])


def test_drafters_alone_need_steps(folders, tmp_path, capsys):
    model, heads = folders
    command = ["calibrate", "--model", model, "--heads", str(heads), "--out", str(tmp_path), "--keep-steps"]
    assert main(command) == 2
    assert "run `specdec-kernels calibrate`" in capsys.readouterr().err


@pytest.mark.parametrize("asks", [[], ["--no-prepare"]])
def test_a_tree_is_chosen_for_the_model_as_it_will_run(folders, tmp_path, capsys, asks):
    """In bf16 on the CPU that is a prepared one, unless it is said otherwise."""
    model, heads = folders
    shutil.copytree(heads, tmp_path / "heads", ignore=shutil.ignore_patterns("calibration*"))
    heads = tmp_path / "heads"
    save_accuracies(heads / "accuracy.json", [[0.6, 0.2], [0.5, 0.1]])
    command = ["tree", "optimize", "--heads", str(heads), "--model", model, "--context", "16", "--nodes", "3"]
    assert main([*command, *asks]) == 0
    prepared = not asks and load_errors["_C"] is None
    assert (", prepared, " in capsys.readouterr().out) == prepared
    setting = Setting.here(torch.device("cpu"), torch.bfloat16, prepared=prepared)
    assert set(Calibration.load(heads, setting).drafters) == {"medusa"}
    with pytest.raises(ValueError, match="has nothing for "):
        Calibration.load(heads, Setting.here(torch.device("cpu"), torch.bfloat16, prepared=not prepared))


def test_times_of_a_busy_machine_are_marked(capsys):
    setting = Setting("A CPU", 1, "float32", False)
    steady, busy = [(1, 16, 1, 10e3), (1, 16, 2, 9e3), (1, 16, 8, 30e3)], [(2, 16, 1, 40e3), (2, 16, 2, 20e3)]
    print_table(Calibration(setting, CostTable(steady)), 16)
    assert "not to be trusted" not in capsys.readouterr().out
    print_table(Calibration(setting, CostTable([*steady, *busy, (2, 16, 8, 30e3)])), 16)
    printed = capsys.readouterr().out
    assert (
        printed.count("not to be trusted: 40.0 ms with nodes = 1, but 20.0 ms with nodes = 2. The machine was busy")
        == 1
    )


def test_prepare_in_vain_is_one_line(folders):
    with pytest.raises(SystemExit, match="--prepare needs --dtype bfloat16"):
        main(["calibrate", "--model", folders[0], "--heads", str(folders[1]), "--dtype", "float32", "--prepare"])


def test_a_tree_is_chosen_with_the_drafters_own_time(folders, tmp_path, capsys):
    """Measured by itself where it was not, without measuring the steps again."""
    model, heads = folders
    shutil.copytree(heads, tmp_path / "heads", ignore=shutil.ignore_patterns("calibration*"))
    heads = tmp_path / "heads"
    save_accuracies(heads / "accuracy.json", [[0.6, 0.2], [0.5, 0.1]])
    optimize = ["tree", "optimize", "--heads", str(heads), "--model", model, "--dtype", "float32", "--context", "16"]
    assert main([*optimize, "--nodes", "3"]) == 0
    assert "drafting with medusa counted" in capsys.readouterr().out
    setting = Setting.here(torch.device("cpu"), torch.float32, prepared=False)
    known = Calibration.load(heads, setting)
    assert set(known.drafters) == {"medusa"}
    # As if it had been calibrated without drafters, with steps that no machine has.
    Calibration(setting, CostTable([(1, 16, 1, 1e9), (1, 16, 2, 1e9)])).save(heads)
    assert main([*optimize, "--nodes", "3"]) == 0
    found = Calibration.load(heads, setting)
    assert set(found.drafters) == {"medusa"}
    assert found.steps.points == [(1, 16, 1, 1e9), (1, 16, 2, 1e9)]
    assert found.step_us("medusa")(2, 1, 16) > 1e9
