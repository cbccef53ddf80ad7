"""The examples in docstrings run, except those that need a tokenizer or a running decode loop."""

import doctest
import importlib

import pytest
import torch

from tests.hf.tiny import tiny_model

MODULES = [
    "decoding.drafters.medusa",
    "decoding.randomness",
    "decoding.stats",
    "hf.target",
    "ops.kv_compact",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"specdec_kernels.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch, "model": tiny_model()})
    assert result.attempted > 0
    assert result.failed == 0
