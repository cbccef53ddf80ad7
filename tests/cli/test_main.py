"""``specdec-kernels`` itself: the commands, and what they say when an optional package is missing."""

import importlib
import subprocess
import sys

import pytest

from specdec_kernels.cli.__main__ import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert COMMANDS[command] in " ".join(capsys.readouterr().out.split())


def test_an_unknown_command_lists_the_known_ones(capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["dance"])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert [name for name in (*COMMANDS, "dance") if name not in message] == []


@pytest.mark.parametrize("command", [["demo"], ["train", "medusa", "--out", "unused"]], ids=["demo", "train"])
def test_a_missing_package_is_one_line(command, tmp_path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None;"
        f"from specdec_kernels.cli.__main__ import main; raise SystemExit(main({command!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"specdec-kernels {command[0]}: transformers is not installed: pip install 'specdec-kernels[hf]'\n"
    )


def test_what_is_not_there_is_one_line(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="there are no heads at"):
        main(["demo", "--heads", str(tmp_path / "nothing")])
    assert main(["demo", "--heads", str(tmp_path), "--model", str(tmp_path / "no-model")]) == 2
    assert "specdec-kernels demo: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "goes_on"), [(["train", "medusa", "--out", "unused"], True), (["tree", "list"], False)], ids=str
)
def test_a_stopped_command_says_whether_it_goes_on(command, goes_on, capsys, monkeypatch) -> None:
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"specdec_kernels.cli.{command[0]}"), "run", stop)
    assert main(command) == 130
    further = "; the same command goes on from here" if goes_on else ""
    assert capsys.readouterr().err == f"specdec-kernels {command[0]}: stopped{further}\n"


@pytest.mark.parametrize(
    "option",
    [
        ["--temperature", "-1"],
        ["--min-prob", "2"],
        ["--max-new-tokens", "0"],
        ["--device", "tpu"],
        ["--device", "cuda:99"],
    ],
    ids=str,
)
def test_the_demo_refuses_bad_options(option, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["demo", *option])
    assert option[0] in capsys.readouterr().err
