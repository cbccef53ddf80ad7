"""Merged drafts over a text that repeats itself, so that n-grams are accepted: exits, neighbours, ends and laws."""

from functools import partial

import pytest
import torch

from specdec_kernels.decoding import ExitRule
from specdec_kernels.decoding.drafters import DraftModelDrafter, LayerSkipDrafter, MergedDrafter, NGramDrafter
from specdec_kernels.hf import HFTarget
from specdec_kernels.tree import DraftTree

from .self_drafting import LENGTHS, generated
from .test_kangaroo import TREE, hopping, llama


def with_ngrams(drafter):
    return MergedDrafter(drafter, ngrams())


def ngrams():
    return NGramDrafter(max_ngram=1, num_branches=2, max_drafts=4)


# What drafts exactly as the target says, three levels, and is led by what was accepted of it.
EXACT = {
    "kangaroo": lambda model, rule: hopping(model, 3, max_drafts=3, exit_rule=rule),
    "kangaroo tree": lambda model, rule: hopping(model, 3, tree=DraftTree.chain(3), exit_rule=rule),
    "layer skip": lambda model, rule: LayerSkipDrafter([], [], max_drafts=3, exit_rule=rule),
    "draft model": lambda model, rule: DraftModelDrafter(partial(HFTarget, model), max_drafts=3, exit_rule=rule),
}


# Layers that Kangaroo has run must have been run for the trunk, so it is the trunk.
@pytest.mark.parametrize(
    ("name", "is_first"), [*((name, True) for name in EXACT), ("layer skip", False), ("draft model", False)]
)
def test_an_exit_counts_the_drafters_own_drafts(name, is_first, monkeypatch):
    """Nodes of the others are no drafts of its own: one that is always right sees all of its drafts accepted."""
    model, rule, seen = llama(), ExitRule(threshold=0.01, step=0.0), []
    drafter = EXACT[name](model, rule)
    begin = drafter.begin

    def watched(*arguments):
        begin(*arguments)
        observe = drafter.exits.observe

        def recording(drafted, accepted, active):
            seen.append((drafted[active].tolist(), accepted[active].tolist()))
            observe(drafted, accepted, active)

        drafter.exits.observe = recording

    monkeypatch.setattr(drafter, "begin", watched)
    merged = MergedDrafter(drafter, ngrams()) if is_first else MergedDrafter(ngrams(), drafter)
    expected, _ = generated(model)
    actual, stats = generated(model, merged)
    assert torch.equal(actual, expected)
    assert len(stats.accepted_histogram) > 4, "an n-gram went on where the drafter ended"
    assert len(seen) == stats.num_steps
    assert {count for drafted, _ in seen for count in drafted} == {3}
    assert all(drafted == accepted for drafted, accepted in seen)


ADAPTIVE = ExitRule(threshold=0.15, step=0.3, threshold_decay=0.5)
PARTLY_RIGHT = {
    "kangaroo": lambda model: hopping(model, 3, exit_rule=ADAPTIVE),
    "kangaroo tree": lambda model: hopping(model, 3, tree=TREE, exit_rule=ADAPTIVE),
    "layer skip": lambda model: LayerSkipDrafter([2], [1], max_drafts=4, exit_rule=ADAPTIVE),
}


@pytest.mark.parametrize("name", PARTLY_RIGHT)
def test_a_rows_sample_does_not_depend_on_the_batch(name):
    model, make = llama(), PARTLY_RIGHT[name]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 40}
    together, _ = generated(model, with_ngrams(make(model)), seed=[5, 6, 7, 8], **options)
    for row, length in enumerate(LENGTHS):
        alone, _ = generated(model, with_ngrams(make(model)), [length], seed=[5 + row], **options)
        assert torch.equal(alone[0, length:], together[row, max(LENGTHS) :])
