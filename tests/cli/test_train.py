import json
import shlex
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from specdec_kernels.cli.__main__ import main
from specdec_kernels.cli._data import places_and_data
from specdec_kernels.hf.load import load_model, load_tokenizer
from specdec_kernels.modules.medusa import MedusaHeads
from specdec_kernels.tree import DraftTree

from ..training.tiny import save_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def arguments(model, out, *more):
    sizes = (
        "--tokens 400 --user-len 4 --answer-len 12 --slots 8 --num-heads 3 --head-layers 2 --epochs 1 --batch-size 64"
    )
    return ["train", "medusa", "--model", model, "--out", str(out), "--dtype", "float32", *sizes.split(), *more]


def test_two_commands_make_heads_and_their_tree(tiny, tmp_path, capsys):
    out = tmp_path / "heads"
    assert main(arguments(tiny, out, "--draft-vocab", "20")) == 0
    printed = capsys.readouterr().out
    assert "hidden states:" in printed
    assert "MB in" in printed
    assert "top-10" in printed
    assert main(["tree", "optimize", "--heads", str(out), "--nodes", "6"]) == 0
    heads, tree = MedusaHeads.from_pretrained(out), DraftTree.load(out / "tree.json")
    assert (heads.num_heads, heads.num_layers, heads.num_rows, heads.vocab_size) == (3, 2, 20, 30)
    assert heads.root_conditioned
    assert tree.num_nodes == 6
    assert tree.max_depth <= 3
    assert json.loads((out / "accuracy.json").read_text())["command"].startswith("specdec-kernels ")
    assert {p.name for p in out.iterdir()} == {
        *("medusa_lm_head.safetensors", "config.json", "accuracy.json", "training_curve.jsonl", "tree.json"),
        "training_curve.svg",
    }


def test_a_second_training_goes_on_from_the_first(tiny, tmp_path, capsys):
    assert main(arguments(tiny, tmp_path / "first")) == 0
    more = ("--work", str(tmp_path / "first.work"), "--init", str(tmp_path / "first"))
    assert main(arguments(tiny, tmp_path / "second", *more)) == 2
    assert "was made with another init (None, now " in capsys.readouterr().err.splitlines()[-1]
    shutil.rmtree(tmp_path / "first.work" / "training")
    assert main(arguments(tiny, tmp_path / "second", *more, "--lr", "0")) == 0
    first, second = (MedusaHeads.from_pretrained(tmp_path / name) for name in ("first", "second"))
    assert torch.equal(first.w_res, second.w_res)
    assert main(arguments(tiny, tmp_path / "third", *more[:3], str(tmp_path / "nowhere"))) == 2
    assert "nowhere" in capsys.readouterr().err.splitlines()[-1]


def test_what_is_printed_as_next_gives_an_expected_speed_up(tiny, tmp_path, capsys):
    out = tmp_path / "heads"
    assert main(arguments(tiny, out)) == 0
    following = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("next: specdec-kernels ")[2])
    assert following[:2] == ["tree", "optimize"]
    assert main([*following, "--context", "16", "--nodes", "8"]) == 0
    printed = capsys.readouterr().out
    assert "ms per step by nodes" in printed
    assert "tokens/s" in printed
    assert "x plain" in printed
    assert DraftTree.load(out / "tree.json").num_nodes <= 8
    assert main([*following, "--context", "16"]) == 0
    known = capsys.readouterr().out
    assert "ms per step by nodes" not in known
    assert known.startswith("steps and medusa as they were measured before, in ")
    anew = shlex.split(known.splitlines()[1])
    assert main([*anew[1:], "--nodes", "1", "2", "--repeats", "1", "--max-new-tokens", "4"]) == 0


def test_prompts_from_a_file(tiny, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"turns": [f"w{i % 24} w{i // 24}"]}) for i in range(60)))
    assert main(arguments(tiny, tmp_path / "heads", "--data", str(data), "--no-root-conditioned")) == 0
    assert not MedusaHeads.from_pretrained(tmp_path / "heads").root_conditioned
    work = tmp_path / "heads.work"
    prompts = [json.loads(x)["prompt"] for x in (work / "conversations-0.jsonl").read_text().split()]
    assert all(p[:2] == [1, 4] for p in prompts)


def test_one_command_makes_an_adapter(tiny, tmp_path, capsys):
    out = tmp_path / "adapter"
    sizes = "--tokens 400 --user-len 4 --answer-len 12 --slots 8 --epochs 1 --batch-size 8 --exit-layer 1"
    options = "--kind attention --alpha 0.2 --draft-vocab 20 --on-the-fly --dtype float32"
    command = ["train", "kangaroo", "--model", tiny, "--out", str(out), *sizes.split(), *options.split()]
    assert main(command) == 0
    assert "KangarooDrafter.from_pretrained" in capsys.readouterr().out
    found = json.loads((out / "accuracy.json").read_text())
    assert (found["kind"], found["alpha"], found["draft_vocab"], found["exit_layer"]) == ("attention", 0.2, 20, 1)
    assert {p.name for p in out.iterdir()} == {
        *("model.safetensors", "config.json", "accuracy.json", "training_curve.jsonl"),
        "training_curve.svg",
    }
    new = ["--out", str(tmp_path / "new")]  # refused before any text is written
    assert main([*command, *new, "--exit-layer", "9"]) == 2
    assert "exit_layer must be in [1, 1], got 9" in capsys.readouterr().err.splitlines()[-1]
    assert main([*command, *new, "--init", str(tmp_path / "none")]) == 2
    assert "there is no adapter at" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new.work").exists()


def test_medusa_2_by_one_command(tiny, tmp_path, capsys):
    out = tmp_path / "heads"
    options = ("--joint-epochs", "0.5", "--lora-rank", "0", "--on-the-fly", "--batch-size", "8")
    assert main(arguments(tiny, out, *options)) == 0
    assert f"belong to the tuned model, {out}/model" in capsys.readouterr().out
    assert load_model(str(out / "model"), torch.float32).config.hidden_size == 32
    assert load_tokenizer(str(out / "model")).chat_template
    assert {p.name for p in out.iterdir()} >= {"training_curve.svg", "warm_up_curve.svg", "warm_up_curve.jsonl"}


def test_errors_are_one_line(tiny, tmp_path, capsys):
    def message(*words):
        capsys.readouterr()
        assert main(list(words)) == 2
        return capsys.readouterr().err.splitlines()[-1]

    out, folder = tmp_path / "heads", str(tmp_path / "models" / "none")
    (tmp_path / "broken.jsonl").write_text('{"title": 1}\n')
    assert "there is no file" in message(*arguments(tiny, out, "--data", str(tmp_path / "none.jsonl")))
    assert "broken.jsonl:1: needs" in message(*arguments(tiny, out, "--data", str(tmp_path / "broken.jsonl")))
    assert message(*arguments(folder, out)) == f"specdec-kernels train medusa: there is no model at {folder}"
    assert "cannot load" in message(*arguments(str(tmp_path), out))
    assert "is a file" in message(*arguments(tiny, tmp_path / "broken.jsonl"))
    # None of these has written anything that stands in the way of the right one.
    assert main(arguments(tiny, out)) == 0
    assert "a run with another seed (0, now 3), user_len (4, now 5)" in message(
        *arguments(tiny, out, "--seed", "3", "--user-len", "5")
    )
    assert "made with another num_layers (2, now 1); remove it" in message(*arguments(tiny, out, "--head-layers", "1"))


@pytest.mark.parametrize("words", ["--tokens 0", "--slots 0", "--num-heads 0", "--epochs 0", "--lr -1", "--device tpu"])
def test_numbers_that_make_no_sense_show_the_usage(tmp_path, capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(arguments("smollm2", tmp_path / "heads", *words.split()))
    assert words.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_folder_here_has_its_work_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = Namespace(out=Path("."), work=None, data=None, model="m", dtype="float32", seed=0, user_len=1, answer_len=1)
    assert places_and_data(args)[:2] == (Path("."), tmp_path.with_name(tmp_path.name + ".work"))
