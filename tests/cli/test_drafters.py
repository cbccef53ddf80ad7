"""Drafters by name."""

import json
import re
import shutil
from argparse import ArgumentParser

import pytest
import torch

from specdec_kernels.cli import _drafters
from specdec_kernels.cli.__main__ import main
from specdec_kernels.decoding import DynamicTree, drafters
from specdec_kernels.hf import speculative_generate
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.training.kangaroo import AdapterOptions, fresh_adapter
from specdec_kernels.tree import DraftTree
from tests.hf.tiny import VOCAB, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    MedusaHeads(2, 1, 64, VOCAB).save_pretrained(folder / "heads")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(folder / "small")
    fresh_adapter(AdapterOptions(exit_layer=1), [], tiny_model()).save_pretrained(folder / "adapter")
    drafters.LayerSkipDrafter([1], [1]).save_pretrained(folder / "skips")
    return folder


def arguments(folder, *options):
    parser = ArgumentParser()
    parser.add_argument("--model", default="another")
    _drafters.add_arguments(parser)
    return parser.parse_args(["--heads", str(folder / "heads"), *options])


KINDS = {
    "medusa": drafters.MedusaDrafter,
    "ngram": drafters.NGramDrafter,
    "medusa+ngram": drafters.MergedDrafter,
    "kangaroo": drafters.KangarooDrafter,
    "kangaroo-tree": drafters.KangarooDrafter,
    "kangaroo+ngram": drafters.MergedDrafter,
    "layer-skip": drafters.LayerSkipDrafter,
    "draft-model": drafters.DraftModelDrafter,
    "plain": drafters.PlainDrafter,
}


PLACES = {"draft-model": "small", "adapter": "adapter", "skips": "skips"}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_every_name_makes_a_drafter(folder, name, kind):
    places = [f"--{option}={folder / place}" for option, place in PLACES.items()]
    args = arguments(folder, *places)
    _drafters.check(name, args)
    model = tiny_model("llama")
    drafter = _drafters.make(name, args, model)
    assert type(drafter) is kind
    prompt = torch.tensor([[5, 6, 5]])
    options = {"max_new_tokens": 4, "eos_token_id": None}
    ids = model.generate(prompt, custom_generate=speculative_generate, drafter=drafter, **options)
    assert ids.shape == (1, 7)


def test_a_budget_makes_dynamic_trees(folder):
    drafter = _drafters.make("medusa", arguments(folder, "--draft-nodes", "7"), tiny_model("llama"))
    assert drafter.tree == DynamicTree(7)


def test_kangaroo_drafts_chains_or_a_tree(folder, tmp_path):
    args, model = arguments(folder, f"--adapter={folder / 'adapter'}"), tiny_model("llama")
    chain, tree = (_drafters.make(name, args, model) for name in ("kangaroo", "kangaroo-tree"))
    assert (chain.tree, tree.tree) == (None, _drafters.KANGAROO_TREE)
    assert (chain.max_nodes, tree.max_nodes) == (7, 8)
    assert {drafter.exit_rule.threshold for drafter in (chain, tree)} == {_drafters.KANGAROO_THRESHOLD}
    own = DraftTree.from_choices([[0], [1]])
    shutil.copytree(folder / "adapter", tmp_path / "adapter")
    own.save(tmp_path / "adapter" / "tree.json")
    args.adapter = tmp_path / "adapter"
    assert _drafters.make("kangaroo-tree", args, model).tree == own, "the adapter's own tree goes first"


def test_a_probability_of_nodes(folder):
    """It goes to the dynamic trees, those of the heads' folder among them, and to the n-grams."""
    model = tiny_model("llama")

    def tree(*options):
        return _drafters.make("medusa", arguments(folder, *options), model).tree

    assert tree("--draft-nodes", "7", "--min-prob", "0.2") == DynamicTree(7, min_prob=0.2)
    assert not isinstance(tree("--min-prob", "0.2"), DynamicTree)
    DynamicTree(9, min_prob=0.1).save(folder / "heads" / "tree.json")
    try:
        assert [tree(), tree("--min-prob", "0.3")] == [DynamicTree(9, min_prob=p) for p in (0.1, 0.3)]
    finally:
        (folder / "heads" / "tree.json").unlink()
    for name in ("ngram", "medusa+ngram"):
        lookup = _drafters.make(name, arguments(folder, "--min-prob", "0.3"), model)
        assert (lookup.drafters[1] if name != "ngram" else lookup).min_prob == 0.3


def test_every_name_is_tested():
    assert set(_drafters.NAMES) == set(KINDS)


@pytest.mark.parametrize(
    ("name", "option", "lacking", "some", "command"),
    [
        ("medusa", "heads", "are no heads", "some", "train medusa"),
        ("kangaroo+ngram", "adapter", "is no adapter", "one", "train kangaroo --exit-layer N"),
        ("layer-skip", "skips", "are no skips", "some", "search layers"),
    ],
)
def test_what_is_missing_is_said(folder, tmp_path, name, option, lacking, some, command):
    with pytest.raises(SystemExit, match=f"there {lacking} at"):
        main(["demo", "--drafter", name, f"--{option}", str(tmp_path / "nothing")])
    args = arguments(folder)
    args.heads = None
    help = f"there {lacking} shipped for another; make {some} with `specdec-kernels {command} --model another"
    with pytest.raises(SystemExit, match=f"{re.escape(help)} --out FOLDER`, then pass --{option} FOLDER"):
        _drafters.check(name, args)


def test_heads_of_another_model_are_one_line(folder, tmp_path):
    MedusaHeads(2, 1, 8, VOCAB).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="--drafter medusa: MedusaDrafter: the heads are made for"):
        _drafters.make("medusa", arguments(folder, "--heads", str(tmp_path)), tiny_model())


def test_a_draft_model_must_be_named(folder):
    with pytest.raises(SystemExit, match="--drafter draft-model needs --draft-model MODEL"):
        _drafters.check("draft-model", arguments(folder))


def test_shipped_skips_are_complete():
    saved = json.loads((_drafters.SHIPPED_SKIPS / "layer_skip.json").read_text())
    trials = [json.loads(line) for line in (_drafters.SHIPPED_SKIPS / "trials.jsonl").read_text().splitlines()]
    drafter = drafters.LayerSkipDrafter.from_pretrained(_drafters.SHIPPED_SKIPS)
    assert sorted(drafter.plan.skipped_attention) == saved["skipped_attention"]
    best = max(trials, key=lambda trial: trial["tokens_per_s"])
    assert {key: best[key] for key in ("skipped_attention", "skipped_mlp")} == {
        key: saved[key] for key in ("skipped_attention", "skipped_mlp")
    }
    assert saved["held_out"]["tokens_per_s"] > saved["uniform_held_out"]["tokens_per_s"]
