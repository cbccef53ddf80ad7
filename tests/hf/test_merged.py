"""Merged drafts over a text that repeats itself, so that n-grams are accepted: exits, neighbours, ends and laws."""

from functools import partial

import pytest
import torch

from specdec_kernels.decoding import DynamicTree, ExitRule
from specdec_kernels.decoding.drafters import (
    DraftModelDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    MergedDrafter,
    NGramDrafter,
)
from specdec_kernels.hf import HFTarget
from specdec_kernels.hf.generate import generate
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.tree import DraftTree
from tests.decoding.test_loop_law import LIMIT

from .self_drafting import LAW_VOCAB, LENGTHS, excess, generated, law_model, prompts
from .test_kangaroo import NO_EXIT, TREE, hopping, llama
from .tiny import VOCAB


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


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
def test_what_kangaroo_has_cached_stays_when_another_one_runs_layers(tree, nested):
    """The other's rows of the cache are the same ones; Kangaroo's go into the verification."""
    model = llama()
    options = {"max_new_tokens": 40}
    expected, _ = generated(model, **options)
    kangaroo, skipping = hopping(model, 2, tree=tree, max_drafts=2), LayerSkipDrafter([1], [2], exit_rule=NO_EXIT)
    drafter = MergedDrafter(with_ngrams(kangaroo), skipping) if nested else MergedDrafter(kangaroo, skipping)
    actual, stats = generated(model, drafter, **options)
    assert torch.equal(actual, expected)
    assert stats.mean_accepted > 0.5


def test_kangaroo_must_be_the_first_one():
    """The rows of its adapter are moved by the numbers of the nodes, which only the first one's keep."""
    kangaroo = hopping(llama(), 2)
    for other in (kangaroo, with_ngrams(kangaroo)):
        with pytest.raises(ValueError, match=f"{type(other).__name__} runs layers for the verification; it must be"):
            MergedDrafter(ngrams(), other)


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


NEW = 30
SMALL_TREE = DraftTree.from_choices([[0], [1], [0, 0]])


@pytest.fixture(scope="module")
def repeating():
    """A model, prompts that hold the first two tokens of the text that it repeats, and what it says then."""
    model = llama()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    inputs = prompts(LENGTHS)
    begun = model.generate(**inputs, max_new_tokens=2, **options)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    inputs = {"input_ids": begun, "attention_mask": mask}
    return model, inputs, model.generate(**inputs, max_new_tokens=NEW, **options)


def fitted_medusa(model, repeating, tree, noise):
    """Two heads, fitted to these texts by least squares: right now and then."""
    _, inputs, texts = repeating
    heads = MedusaHeads(2, 1, model.config.hidden_size, VOCAB, own_projection=True).requires_grad_(False)
    lengths = inputs["attention_mask"].sum(1).tolist()
    rows = [text[-length - NEW :] for text, length in zip(texts, lengths, strict=True)]
    with torch.no_grad():
        states = [model.base_model(row[None]).last_hidden_state[0] for row in rows]
    for head in range(2):
        ahead = head + 2
        features = torch.cat([hidden[:-ahead] for hidden in states])
        said = torch.cat([row[ahead:] for row in rows])
        heads.w_out[head] = torch.linalg.lstsq(features, torch.eye(VOCAB)[said]).solution.T
    heads.w_out += noise * torch.randn(heads.w_out.shape, generator=torch.Generator().manual_seed(3))
    heads.w_out *= 12  # so that they are sure of what they say: a dynamic tree asks for it
    return MedusaDrafter(heads, tree)


def disturbed_twin(noise):
    twin, generator = llama(), torch.Generator().manual_seed(3)
    for parameter in twin.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return twin


# From nearly right to useless, by the noise.
TRUNKS = {
    "medusa": lambda repeating, noise: fitted_medusa(repeating[0], repeating, SMALL_TREE, noise),
    "medusa, dynamic": lambda repeating, noise: fitted_medusa(repeating[0], repeating, DynamicTree(5, 3, 0.05), noise),
    "draft model": lambda repeating, noise: DraftModelDrafter(
        partial(HFTarget, disturbed_twin(noise)), max_drafts=2, exit_rule=NO_EXIT
    ),
    "kangaroo": lambda repeating, noise: hopping(repeating[0], 3, noise=noise, max_drafts=2),
    "kangaroo tree": lambda repeating, noise: hopping(repeating[0], 3, noise=noise, tree=SMALL_TREE),
    "layer skip": lambda repeating, noise: LayerSkipDrafter(
        range(3) if noise > 0.5 else [1], [], max_drafts=2, exit_rule=NO_EXIT
    ),
}
DRAFTERS = {
    "ngram": lambda repeating, noise: NGramDrafter(max_drafts=5),
    "ngram tree": lambda repeating, noise: ngrams(),
    **TRUNKS,
    **{f"{name} + ngram": lambda *given, make=make: with_ngrams(make(*given)) for name, make in TRUNKS.items()},
}


def sizes_of(drafter):
    """Record how many nodes a drafter proposes in each row, as a draft or in lists."""
    sizes, propose, trees = [], drafter.propose, getattr(drafter, "trees", None)

    def proposing(pending):
        draft = propose(pending)
        sizes.append([draft.ids.shape[1]] * len(pending) if draft.num_nodes is None else draft.num_nodes.tolist())
        return draft

    def listing(pending):
        found = trees(pending)
        sizes.append([len(tree.ids) for tree in found])
        return found

    drafter.propose = proposing
    if trees is not None:
        drafter.trees = listing
    return sizes


def accepted_drafts(drafter):
    """Return two lists that will hold, for each accepted node, its row and its place in the new text.

    The first one those that the others added, of a drafter alone all; the second one those of the first drafter.
    """
    sizes = sizes_of(drafter.drafters[0]) if isinstance(drafter, MergedDrafter) else None
    found, own, emitted, observe = [], [], {}, drafter.observe

    def watching(draft, output, verification, active):
        for row in active.nonzero()[:, 0].tolist():
            used = 1 if sizes is None else sizes[-1][row]
            count = int(verification.num_accepted[row])
            path = verification.accepted[row, :count].tolist()
            # The first token comes from the prompt.
            start = emitted.setdefault(row, 1)
            for place, node in enumerate(path):
                (found if node >= used else own).append((row, start + place))
            emitted[row] += count + 1
        observe(draft, output, verification, active)

    drafter.observe = watching
    return found, own


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_the_others_add_is_accepted_beside_and_behind_good_drafts(name, repeating):
    model, inputs, plain = repeating
    drafter = DRAFTERS[name](repeating, 0.02)
    found, own = accepted_drafts(drafter)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(generate(model, **inputs, drafter=drafter, **options), plain)
    assert len(found) > 0
    assert "+" not in name or len(own) > 0, "the first drafter's own are accepted, too"


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_token_inside_an_accepted_graft_ends_the_text(name, repeating):
    model, inputs, plain = repeating
    # The first drafter is useless, so that what is new is said by the others.
    noise = 0.02 if name in TRUNKS else 1.0
    drafter = DRAFTERS[name](repeating, noise)
    (found, _), width = accepted_drafts(drafter), inputs["input_ids"].shape[1]
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    generate(model, **inputs, drafter=drafter, eos_token_id=None, **options)
    said = plain[:, width:].tolist()
    # An accepted node is not the last of its step: the verification goes on behind the end.
    row, place = next((row, place) for row, place in found if said[row][place] not in said[row][:place])
    eos = said[row][place]
    expected = model.generate(**inputs, eos_token_id=eos, **options)
    ours = generate(model, **inputs, drafter=DRAFTERS[name](repeating, noise), eos_token_id=eos, **options)
    assert torch.equal(ours, expected)
    assert (expected[row, width + place + 1 :] == 0).all()


# Every token has been followed by every other one, so n-grams branch widely.
LAW_PROMPT = (0, 0, 1, 0, 2, 0, 3, 0, 4, 1, 1, 2, 1, 3, 1, 4, 2, 2, 3, 2, 4, 3, 3, 4, 4, 0)


def law_heads():
    heads = MedusaHeads(2, 1, 16, LAW_VOCAB, own_projection=True)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return heads.requires_grad_(False)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: hopping(model, 2, max_drafts=1),
        lambda model: hopping(model, 2, tree=DraftTree.from_choices([[0], [1]])),
        lambda model: LayerSkipDrafter([1, 2], [2], max_drafts=1, exit_rule=NO_EXIT),
        lambda model: MedusaDrafter(law_heads(), DraftTree.from_choices([[0], [1]])),
        lambda model: MedusaDrafter(law_heads(), DynamicTree(4, 3, 0.1)),
    ],
    ids=["kangaroo", "kangaroo tree", "layer skip", "medusa", "medusa, likely nodes"],
)
def test_sampled_text_has_the_targets_law(make):
    """The joint law of the first three tokens, where grafted nodes are among them."""
    model = law_model()
    drafter = MergedDrafter(make(model), NGramDrafter(max_ngram=1, num_branches=4, max_drafts=2))
    counts, observe = [], drafter.observe
    sizes = sizes_of(drafter.drafters[0])

    def watching(draft, output, verification, active):
        counts.append(int((verification.accepted >= torch.tensor(sizes[-1])[:, None]).sum()))
        observe(draft, output, verification, active)

    drafter.observe = watching
    assert excess(model, drafter, 0.8, LAW_PROMPT) < LIMIT
    assert sum(counts) > 400, "grafted nodes are accepted"
