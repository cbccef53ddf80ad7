"""Calibrations as files: one for each device, with an entry for each setting."""

import json

import pytest
import torch

from specdec_kernels.decoding.budget import CostTable
from specdec_kernels.decoding.calibration import Calibration, DrafterProfile, Setting

HERE = Setting("A CPU (2)", 2, "bfloat16", True)
STEPS = CostTable([(1, 256, 1, 100.0), (1, 256, 9, 180.0), (8, 256, 1, 150.0), (8, 256, 9, 900.0)])


def calibration(setting=HERE, **options):
    profile = DrafterProfile([1.0, 0.5, 0.25, 0.1], [0, 1, 0, 0, 3], CostTable([(1, 40, 1, 1.0), (1, 40, 4, 10.0)]), 77)
    return Calibration(setting, STEPS, {"medusa": profile}, {"model": "m"}, **options)


def test_there_and_back(tmp_path):
    path = calibration().save(tmp_path)
    assert path.name == "calibration.a-cpu-2.json"
    loaded = Calibration.load(tmp_path, HERE)
    assert loaded.steps.points == STEPS.points
    assert loaded.metadata == {"model": "m"}
    profile = loaded.drafters["medusa"]
    assert (profile.gains, profile.widths, profile.num_steps) == ([1.0, 0.5, 0.25, 0.1], [0, 1, 0, 0, 3], 77)
    assert profile.rest.points == [(1, 40, 1, 1.0), (1, 40, 4, 10.0)]
    assert all(len(line) < 200 for line in path.read_text().splitlines())


def test_a_setting_replaces_itself_alone(tmp_path):
    other = Setting("A CPU (2)", 1, "bfloat16", True)
    calibration().save(tmp_path)
    calibration(other).save(tmp_path)
    changed = calibration()
    changed.metadata["model"] = "n"
    path = changed.save(tmp_path)
    assert [entry["setting"]["threads"] for entry in json.loads(path.read_text())["calibrations"]] == [1, 2]
    assert Calibration.load(path, HERE).metadata == {"model": "n"}
    assert Calibration.load(path, other).metadata == {"model": "m"}


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="specdec-kernels calibrate"):
        Calibration.load(tmp_path, HERE)
    path = calibration().save(tmp_path)
    with pytest.raises(
        ValueError, match=r"nothing for A CPU \(2\), 2 threads, bfloat16, not prepared; it has .*, prepared"
    ):
        Calibration.load(path, Setting("A CPU (2)", 2, "bfloat16", False))
    with pytest.raises(ValueError, match=r"no drafter 'x' was measured; there are \['medusa'\]"):
        calibration().budget("x")
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a calibration file"):
        Calibration.load(path, HERE)


@pytest.mark.parametrize("key", ["setting", "steps", "drafters", "rest", "gains"])
def test_an_entry_without_a_part_is_no_calibration(tmp_path, key):
    path = calibration().save(tmp_path)
    content = json.loads(path.read_text())
    (entry,) = content["calibrations"]
    del (entry if key in entry else entry["drafters"]["medusa"])[key]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"not a calibration file: .*{key}"):
        Calibration.load(path, HERE)


def test_a_step_has_the_drafters_time():
    found = calibration()
    assert found.step_us()(9, 1, 256) == found.step_us("unknown")(9, 1, 256) == 180
    assert found.step_us("medusa")(4, 1, 256) == pytest.approx(100 + 3 * 10 + 10)
    budget = found.budget("medusa").budget
    assert budget.step_us(4, 1, 256) == pytest.approx(0.25 * 101 + 0.75 * 140)
    # 1.75 tokens in 0.25 · 101 + 0.75 · 127 beat 1.85 in 130.25.
    assert (budget.choose(1, 256), budget.choose(64, 256)) == (3, 1)


def test_the_setting_of_this_machine():
    here = Setting.here(torch.device("cpu"), torch.float16, prepared=False)
    assert (here.threads, here.dtype, here.prepared) == (torch.get_num_threads(), "float16", False)
    assert here.device
