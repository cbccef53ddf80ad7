"""The examples of docs/generation.md run."""

import doctest
from pathlib import Path

from specdec_kernels.modules import MedusaHeads

from .test_generate import PROMPTS, inputs_of, tiny_tokenizer
from .tiny import VOCAB, tiny_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "generation.md"


def test_examples(tmp_path):
    model = tiny_model("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    MedusaHeads(2, 1, model.config.hidden_size, VOCAB).save_pretrained(tmp_path)
    names = {"model": model, "tokenizer": tiny_tokenizer(), "heads": tmp_path, "inputs": inputs_of(PROMPTS[:1])}
    failed, tried = doctest.testfile(str(DOCUMENT), module_relative=False, globs=names)
    assert failed == 0
    assert tried >= 10
