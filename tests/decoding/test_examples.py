"""The examples in the docstrings run."""

import doctest
import importlib
from itertools import chain

import pytest
import torch

from specdec_kernels.decoding import GreedyAcceptance
from specdec_kernels.decoding.drafters import MedusaDrafter, NGramDrafter
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.tree import DraftTree

from .test_loop import PROMPTS, make
from .toy import pad

DRAFTERS = [f"drafters.{name}" for name in ("draft_model", "medusa", "merged", "ngram", "plain")]


@pytest.mark.parametrize("module", ["budget", "dynamic_tree", "loop", "stats", "randomness", *DRAFTERS])
def test_examples(module):
    target, drafter, _ = make(max_new_tokens=32)
    ids, lengths = pad(PROMPTS)
    names = {
        "torch": torch,
        "chain": chain,
        "DraftTree": DraftTree,
        "MedusaDrafter": MedusaDrafter,
        "MedusaHeads": MedusaHeads,
        "NGramDrafter": NGramDrafter,
        "GreedyAcceptance": GreedyAcceptance,
        "target": target,
        "drafter": drafter,
        "ids": ids,
        "lengths": lengths,
    }
    result = doctest.testmod(importlib.import_module(f"specdec_kernels.decoding.{module}"), extraglobs=names)
    assert result.failed == 0
    assert result.attempted > 0
