"""The examples of the documents about decoding run."""

import doctest
from pathlib import Path

import pytest

from specdec_kernels.decoding.drafters import LayerSkipDrafter
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.training.kangaroo import AdapterOptions, fresh_adapter

from ..marks import needs_native
from .test_generate import PROMPTS, inputs_of, tiny_tokenizer
from .tiny import VOCAB, tiny_model

DOCUMENTS = Path(__file__).parents[2] / "docs"


DOCUMENTED = [
    pytest.param("generation", 14, marks=needs_native),  # it prepares a model
    ("medusa", 7),
    ("ngram", 6),
    ("draft_model", 6),
    ("layer_skip", 6),
    ("kangaroo", 8),
]


@pytest.mark.parametrize(("name", "examples"), DOCUMENTED)
def test_examples(tmp_path, name, examples):
    model = tiny_model("llama", num_hidden_layers=3)
    model.generation_config.eos_token_id = None
    MedusaHeads(2, 1, model.config.hidden_size, VOCAB).save_pretrained(tmp_path)
    names = {"model": model, "tokenizer": tiny_tokenizer(), "heads": tmp_path, "inputs": inputs_of(PROMPTS[:1])}
    LayerSkipDrafter([1], [0]).save_pretrained(tmp_path / "skips")
    fresh_adapter(AdapterOptions(exit_layer=2), [], model).save_pretrained(tmp_path / "adapter")
    names |= {"skips": tmp_path / "skips", "adapter": tmp_path / "adapter"}
    names["small_model"] = tiny_model("llama", num_hidden_layers=1, hidden_size=32)
    failed, tried = doctest.testfile(str(DOCUMENTS / f"{name}.md"), module_relative=False, globs=names)
    assert failed == 0
    assert tried >= examples
