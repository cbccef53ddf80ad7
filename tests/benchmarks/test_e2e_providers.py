"""The providers of this interpreter, on a model of one layer."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.e2e import providers


@pytest.fixture
def settings(tmp_path) -> Iterator[SimpleNamespace]:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=1, eos_token_id=None, initializer_range=0.5, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    common = {"dtype": "float32", "threads": torch.get_num_threads(), "batch_size": 1, "max_length": 48}
    with providers.inductor.patch({"freezing": False}):  # the provider sets it; pytest's patch would delete it after
        yield SimpleNamespace(name="generate", folder=str(tmp_path), pad_id=0, eos_ids=[], **common)


@pytest.mark.slow
def test_transformers_compiled_decodes_what_generate_does(settings) -> None:
    """More than one prompt: a frozen graph would go on with the first one's cache."""
    plain = providers.hugging_face(settings)
    compiled = providers.hugging_face_compiled(settings)
    for prompt in ([[3, 1, 4, 1, 5]], [[9, 2, 6]]):
        wanted, found = plain.decode(prompt, 16), compiled.decode(prompt, 16)
        assert found.texts == wanted.texts
        assert (found.passes, found.tokens_per_step) == (15, 1.0)
    assert compiled.notes["compiled_in_s"] > 0
