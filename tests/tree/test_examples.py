"""The examples of the docstrings and of docs/trees.md run, and its table of named trees is true."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

from specdec_kernels.tree import preset, preset_names

PAGE = Path(__file__).parents[2] / "docs" / "trees.md"


@pytest.mark.parametrize("module", ["build", "draw", "mask", "optimize", "presets"])
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(f"specdec_kernels.tree.{module}"), extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


def test_examples_of_the_page():
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted > 0
    assert result.failed == 0


def test_table_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for name in preset_names():
        tree = preset(name)
        row = f"| `{name}` | {tree.num_nodes} | {tree.max_depth} | {len(tree.leaves)} |"
        assert name.startswith("chain_") or row in text, row
