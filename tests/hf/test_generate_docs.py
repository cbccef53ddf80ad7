"""The examples of the documents about decoding run."""

import doctest
from pathlib import Path

import pytest

from specdec_kernels.modules import MedusaHeads

from .test_generate import PROMPTS, inputs_of, tiny_tokenizer
from .tiny import VOCAB, tiny_model

DOCUMENTS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("name", "examples"), [("generation", 10), ("ngram", 6), ("draft_model", 6)])
def test_examples(tmp_path, name, examples):
    model = tiny_model("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    MedusaHeads(2, 1, model.config.hidden_size, VOCAB).save_pretrained(tmp_path)
    names = {"model": model, "tokenizer": tiny_tokenizer(), "heads": tmp_path, "inputs": inputs_of(PROMPTS[:1])}
    names["small_model"] = tiny_model("llama", num_hidden_layers=1, hidden_size=32)
    failed, tried = doctest.testfile(str(DOCUMENTS / f"{name}.md"), module_relative=False, globs=names)
    assert failed == 0
    assert tried >= examples
