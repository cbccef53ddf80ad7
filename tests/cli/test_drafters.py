"""Drafters by name."""

import re
from argparse import ArgumentParser

import pytest
import torch

from specdec_kernels.cli import _drafters
from specdec_kernels.cli.__main__ import main
from specdec_kernels.decoding import drafters
from specdec_kernels.hf import speculative_generate
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.training.kangaroo import AdapterOptions, fresh_adapter
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


def test_every_name_is_tested():
    assert set(_drafters.NAMES) == set(KINDS)


def test_what_is_missing_is_said(folder, tmp_path):
    for name, option in (("draft-model", "draft-model MODEL"), ("kangaroo+ngram", "adapter"), ("layer-skip", "skips")):
        with pytest.raises(SystemExit, match=f"--drafter {re.escape(name)} needs --{option}"):
            _drafters.check(name, arguments(folder))
    with pytest.raises(SystemExit, match="there are no heads at"):
        main(["demo", "--drafter", "medusa+ngram", "--heads", str(tmp_path / "nothing")])
    args = arguments(folder)
    args.heads = None
    with pytest.raises(SystemExit, match="no heads are shipped for another; train some with"):
        _drafters.check("medusa", args)
