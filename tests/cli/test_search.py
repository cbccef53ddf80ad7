import json
import sys

import pytest

from specdec_kernels.cli.__main__ import main
from specdec_kernels.cli._arguments import load_errors
from specdec_kernels.decoding.drafters import LayerSkipDrafter

from ..training.tiny import save_tiny_model


def test_one_command_finds_skip_sets(tmp_path, capsys):
    pytest.importorskip("optuna")
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "skips"
    sizes = "--tokens 400 --user-len 4 --answer-len 12 --slots 8 --trials 9 --contexts 8 --max-drafts 3"
    command = ["search", "layers", "--model", model, "--out", str(out), *sizes.split()]
    assert main(command) == 0
    assert "LayerSkipDrafter.from_pretrained" in capsys.readouterr().out
    assert LayerSkipDrafter.from_pretrained(out).max_drafts <= 3
    entry = json.loads((out / "layer_skip.json").read_text())
    assert entry["command"].startswith("specdec-kernels search layers")
    assert entry["prepared"] == (load_errors["_C"] is None), "in bf16 on the CPU, by itself"
    assert main([*command, "--contexts", "9"]) == 2
    assert "a search with another num_contexts (8, now 9)" in capsys.readouterr().err.splitlines()[-1]
    if entry["prepared"]:
        assert main([*command, "--no-prepare"]) == 2
        assert "a search with another prepared (True, now False)" in capsys.readouterr().err.splitlines()[-1]


def test_without_optuna_nothing_is_begun(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["search", "layers", "--out", str(tmp_path / "skips")]) == 2
    said = "specdec-kernels search: optuna is not installed: pip install 'specdec-kernels[search]'\n"
    assert capsys.readouterr().err == said
    assert not any(tmp_path.iterdir())
