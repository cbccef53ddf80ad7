"""``specdec-kernels tree``, called as the command line calls it."""

import json

import pytest
import torch

from specdec_kernels import DraftTree
from specdec_kernels.cli.__main__ import main
from specdec_kernels.decoding.budget import CostTable
from specdec_kernels.decoding.calibration import Calibration, DrafterProfile, Setting
from specdec_kernels.decoding.dynamic_tree import DynamicTree
from specdec_kernels.tree import draw_svg, draw_text, fastest_tree, load_metadata, optimize_tree, preset, preset_names

HEADS = [[0.5, 0.2, 0.1], [0.4, 0.1], [0.3]]


@pytest.fixture
def heads_folder(tmp_path):
    (tmp_path / "accuracy.json").write_text(json.dumps({"heads": HEADS, "model": "a test"}))
    return tmp_path


def test_list(capsys):
    assert main(["tree", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *preset_names()]
    assert lines[1].split()[1:5] == ["64", "4", "42", "10"]


def test_draw_text(capsys):
    assert main(["tree", "draw", "mc_sim_7b_63"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(draw_text(preset("mc_sim_7b_63")))
    assert "64 nodes, depth 4" in out


def test_draw_svg_of_a_file(tmp_path, capsys):
    tree = DraftTree.from_parents([-1, 0, 1, 0])
    tree.save(tmp_path / "tree.json")
    assert main(["tree", "draw", str(tmp_path / "tree.json"), "--svg", str(tmp_path / "out.svg")]) == 0
    assert (tmp_path / "out.svg").read_text(encoding="utf-8") == draw_svg(tree)
    assert "out.svg: 4 nodes" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["choices", "parents", "retrieve_indices"])
def test_convert_there_and_back(tmp_path, capsys, target):
    tree = DraftTree.from_choices([[0], [3], [0, 1], [3, 2]])
    tree.save(tmp_path / "tree.json")
    assert main(["tree", "convert", str(tmp_path / "tree.json"), "--to", target]) == 0
    content = json.loads(capsys.readouterr().out)
    assert target in content
    assert (
        main(["tree", "convert", str(tmp_path / "tree.json"), "--to", target, "--out", str(tmp_path / "b.json")]) == 0
    )
    assert json.loads((tmp_path / "b.json").read_text()) == content
    assert DraftTree.load(tmp_path / "b.json") == tree


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("choices", [[1], [0], [0, 0]]),
        ("parents", [-1, 0, 0, 1]),
        ("retrieve_indices", [[0, 1, 3], [0, 2, -1]]),
    ],
)
def test_convert_a_bare_list(tmp_path, capsys, source, content):
    file = tmp_path / "list.json"
    file.write_text(json.dumps(content))
    assert main(["tree", "convert", str(file), "--from", source, "--to", "choices"]) == 0
    assert json.loads(capsys.readouterr().out) == {"choices": [[0], [1], [0, 0]]}
    assert main(["tree", "convert", str(file), "--to", "choices"]) == 2
    assert "list.json is a bare list: say with --from" in capsys.readouterr().err


def test_optimize_writes_beside_the_heads(heads_folder, capsys):
    assert main(["tree", "optimize", "--heads", str(heads_folder), "--nodes", "6"]) == 0
    out = capsys.readouterr().out
    tree, tokens = optimize_tree(HEADS, 6)
    assert out.startswith(draw_text(tree))
    assert DraftTree.load(heads_folder / "tree.json") == tree
    metadata = load_metadata(heads_folder / "tree.json")
    assert (metadata["expected_tokens_per_step"], metadata["num_heads"], metadata["top_k"]) == (tokens, 3, 3)
    assert str(heads_folder) not in (heads_folder / "tree.json").read_text()
    table = [line.split() for line in out.split("\n\n")[2].splitlines()]
    assert [row[0] for row in table[1:7]] == ["4", "6", "8", "16", "32", "64"]
    assert table[2] == ["6", "6", "2", "3", f"{tokens:.4f}"]
    assert table[7] == ["chain", "4", "3", "1", f"{1 + 0.5 + 0.2 + 0.06:.4f}"]


@pytest.mark.parametrize("batch_size", [1, 64])
def test_optimize_for_a_machine(heads_folder, capsys, batch_size):
    setting = Setting.here(torch.device("cpu"), torch.float32, prepared=False)
    points = [(b, 256, t, max(1000.0, 40.0 * b * t)) for b in (1, 64) for t in (1, 25, 128)]
    calibration = Calibration(setting, CostTable(points))
    calibration.save(heads_folder)
    command = f"tree optimize --heads {heads_folder} --calibration {heads_folder} --dtype float32"
    svg = heads_folder / "speed.svg"
    assert main([*command.split(), "--batch-size", str(batch_size), "--svg", str(svg)]) == 0
    best, _ = fastest_tree(HEADS, lambda nodes: calibration.steps.time_us(nodes, batch_size, 256), 128)
    tree, metadata = DraftTree.load(heads_folder / "tree.json"), load_metadata(heads_folder / "tree.json")
    assert tree == best.tree
    assert (tree.num_nodes == 1) == (batch_size == 64)
    assert metadata["expected_tokens_per_step"] == best.tokens_per_step
    assert metadata["fastest_on"]["batch_size"] == batch_size
    out = capsys.readouterr().out
    assert "drafting taken as free: run `specdec-kernels calibrate --keep-steps --drafter medusa`" in out
    assert ("no drafts pay here" in out) == (best.tree.num_nodes == 1)
    table = [line.split() for line in out.split("\n\n")[2].splitlines() if line[:1].isdigit()]
    speeds = {int(row[0]): float(row[5]) for row in table}
    assert max(speeds, key=speeds.get) == best.tree.num_nodes
    assert svg.read_text(encoding="utf-8").count("<polyline") == 2


@pytest.mark.parametrize(
    ("rows", "options", "nodes"), [(1, "", 2), (1, "--nodes 1", 1), (8, "", 1), (1, "--min-prob 0.2", 2)]
)
def test_optimize_a_dynamic_tree_for_a_machine(heads_folder, capsys, rows, options, nodes):
    """By the nodes that were accepted, whatever accuracies there are."""
    (heads_folder / "accuracy.json").unlink()
    setting = Setting.here(torch.device("cpu"), torch.float32, prepared=False)
    steps = CostTable([(b, 256, t, 900.0 + 100.0 * (b * t) ** 2) for b in (1, 8) for t in (1, 2, 3, 4)])
    profile = DrafterProfile([1.0, 0.6, 0.5, 0.3], [0, 0, 0, 0, 7], CostTable([(1, 256, 1, 100.0)]), 7)
    Calibration(setting, steps, {"medusa": profile}).save(heads_folder)
    command = f"tree optimize --dynamic --heads {heads_folder} --calibration {heads_folder} --dtype float32 {options}"
    svg = heads_folder / "speed.svg"
    assert main([*command.split(), "--batch-size", str(rows), "--svg", str(svg)]) == 0
    metadata = load_metadata(heads_folder / "tree.json")
    assert DynamicTree.from_metadata(metadata) == DynamicTree(nodes, min_prob=0.2 if "--min-prob" in options else 0.0)
    assert metadata["expected_tokens_per_step"] == pytest.approx([1.0, 1.6, 2.1][nodes - 1])
    assert metadata["fastest_on"]["batch_size"] == rows
    out = capsys.readouterr().out
    assert out.startswith(f"{nodes} nodes, the likeliest at each step: the fastest on ")
    assert out.split("\n\n")[1].splitlines()[1].split() == ["1", "1.0000", f"{1 + 0.1 * rows * rows:.1f}", *(
        f"{rows * 1e6 / (1000 + 100 * rows * rows):.1f}", "1.00"
    )]  # fmt: skip
    assert svg.read_text(encoding="utf-8").count("<polyline") == 2


def test_a_dynamic_tree_needs_what_was_measured(heads_folder, capsys):
    assert main(["tree", "optimize", "--dynamic", "--heads", str(heads_folder)]) == 2
    assert "--dynamic needs --calibration or --model" in capsys.readouterr().err
    Calibration(Setting.here(torch.device("cpu"), torch.float32, prepared=False), CostTable([(1, 1, 1, 1.0)])).save(
        heads_folder
    )
    command = f"tree optimize --dynamic --heads {heads_folder} --calibration {heads_folder} --dtype float32"
    assert main(command.split()) == 2
    assert "run `specdec-kernels calibrate --drafter medusa`" in capsys.readouterr().err


def test_optimize_needs_a_budget_or_a_machine(heads_folder, capsys):
    assert main(["tree", "optimize", "--heads", str(heads_folder)]) == 2
    assert "give --nodes, or --calibration" in capsys.readouterr().err
    assert main(["tree", "optimize", "--heads", str(heads_folder), "--calibration", str(heads_folder)]) == 2
    assert "run `specdec-kernels calibrate`" in capsys.readouterr().err


def test_optimize_from_a_file_to_a_file(heads_folder, capsys):
    out = heads_folder / "other.json"
    accuracy = str(heads_folder / "accuracy.json")
    assert (
        main(["tree", "optimize", "--accuracy", accuracy, "--nodes", "9", "--max-children", "1", "--out", str(out)])
        == 0
    )
    assert DraftTree.load(out) == DraftTree.chain(3)
    assert not (heads_folder / "tree.json").exists()
    assert "other.json" in capsys.readouterr().out
    assert main(["tree", "optimize", "--accuracy", accuracy, "--nodes", "4"]) == 0
    assert "wrote" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not a JSON file"),
        ("[[0.5]]", 'must hold {"heads"'),
        ('{"heads": 3}', 'must hold {"heads"'),
        ('{"heads": [[0.5, 0.9]]}', "must add up to at most 1"),
        ('{"heads": [0.5]}', "numbers [heads][ranks]"),
    ],
)
def test_bad_accuracies_are_one_line(tmp_path, capsys, text, message):
    (tmp_path / "accuracy.json").write_text(text)
    assert main(["tree", "optimize", "--heads", str(tmp_path), "--nodes", "6"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "tree.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "no-such-tree"], "no tree is named 'no-such-tree'"),
        (["optimize", "--heads", "no-such-folder", "--nodes", "6"], "accuracy.json"),
        (["draw", "chain_1", "--svg", "no-such-folder/a.svg"], "no-such-folder"),
    ],
)
def test_bad_names_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["tree", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["optimize", "--nodes", "4"],
        ["optimize", "--nodes", "0", "--heads", "a"],
        ["optimize", "--dynamic", "--min-prob", "1.5", "--heads", "a"],
        ["optimize", "--nodes", "4", "--heads", "a", "--accuracy", "b"],
        ["convert", "chain_1"],
    ],
)
def test_missing_arguments_show_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["tree", *arguments])
    assert stopped.value.code == 2
    assert "usage: specdec-kernels tree" in capsys.readouterr().err
