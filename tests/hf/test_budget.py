"""Batches that shrink while they decode: under a budget, with ended rows left out, texts and bits stay as they are."""

import warnings

import pytest
import torch

from specdec_kernels.decoding import DecodeStats, GreedyAcceptance, decode
from specdec_kernels.decoding.budget import CostTable
from specdec_kernels.decoding.calibration import Calibration, DrafterProfile, Setting
from specdec_kernels.decoding.drafters import (
    DraftModelDrafter,
    KangarooDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    MergedDrafter,
    NGramDrafter,
    PlainDrafter,
)
from specdec_kernels.hf import HFTarget
from specdec_kernels.hf.generate import generate
from specdec_kernels.hf.prepare import prepare
from tests.decoding.test_budget import ByRows

from .half_precision import equal_bits
from .test_drafters import ALWAYS, DRAFTERS, REPETITIVE
from .test_generate import BATCHES, NEW, eos_of, medusa
from .test_kangaroo import NO_EXIT, TREE, adapter_for, hopping
from .tiny import VOCAB, record_calls, tiny_model

# By the rows that go on: plain decoding with all four, larger drafts with fewer.
SIZES = {4: 1, 3: 2, 2: 5, 1: 64}
ALL = {**DRAFTERS, "medusa": medusa}


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2)
    model.generation_config.eos_token_id = None
    return model


def rows_of_forwards(model):
    """Record how many rows of the batch each forward of the model has."""
    seen = []
    layer = model.base_model.layers[-1].mlp
    handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[0]))
    return seen, handle


@pytest.mark.parametrize("name", ALL)
def test_a_shrinking_batch_has_the_texts_of_generate(model, name):
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos_of(model, "B4", 3, 8), "pad_token_id": 0}
    expected = model.generate(**BATCHES["B4"], **options)
    ended = (expected == 0).sum(1).unique()
    assert len(ended) > 1, "the rows end together, so nothing shrinks"
    budget, stats = ByRows(SIZES), DecodeStats()
    seen, handle = rows_of_forwards(model)
    ours = generate(model, **BATCHES["B4"], drafter=ALL[name](model), budget=budget, stats=stats, **options)
    handle.remove()
    assert torch.equal(ours, expected)
    asked = [rows for rows, _ in budget.asked]
    assert asked == sorted(asked, reverse=True)
    assert len(set(asked)) > 1
    assert asked[-1] in seen, "ended rows still take part"


def shrinking(model, drafter, budget):
    """Decode four prompts with limits of their own; return each row's tokens and the logits they were chosen from."""
    lengths = REPETITIVE["attention_mask"].sum(1)
    ids = torch.stack([row.roll(int(n)) for row, n in zip(REPETITIVE["input_ids"], lengths, strict=True)])
    limits = [3, 14, 9, 6]
    target = HFTarget(model, 4, ids.shape[1] + max(limits) - 1 + max(drafter.max_nodes, 1))
    tokens, logits = ([[] for _ in limits] for _ in range(2))
    options = {"acceptance": GreedyAcceptance(), "max_new_tokens": limits, "budget": budget}
    for step in decode(target, drafter, ids, lengths.to(torch.int32), **options):
        for row, new in enumerate(step.tokens):
            tokens[row] += new
            logits[row] += step.raw_logits[row, : len(new)].unbind()
    assert [len(row) for row in tokens] == limits
    return tokens, [torch.stack(row) for row in logits]


@equal_bits
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
def test_bf16_has_the_bits_of_plain_decoding(name, prepared):
    model = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2, head_dim=16).bfloat16()
    drafter = ALL[name](model)
    if hasattr(drafter, "adapter"):
        drafter.adapter.to(model.dtype)
    model = prepare(model) if prepared else model
    tokens, logits = shrinking(model, PlainDrafter(), None)
    ours, our_logits = shrinking(model, drafter, ByRows(SIZES))
    assert ours == tokens
    assert all(torch.equal(a, b) for a, b in zip(our_logits, logits, strict=True))


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama", "qwen3"])
def test_rows_that_run_alone_give_what_they_gave_together(family):
    """Windows, sinks, soft caps: paged attention over the same cache, in fp64 where sums differ less than tokens do."""
    model = tiny_model(family).double()
    tokens, mask = torch.randint(3, VOCAB, (3, 11)), torch.ones(1, 1, 1, dtype=torch.int64)
    depths, nothing = torch.zeros(1, 1, dtype=torch.int32), torch.empty(3, 0, dtype=torch.int32)
    lengths = torch.tensor([8, 3, 5], dtype=torch.int32)
    outputs = []
    for rows in ([0, 1, 2], [0, 2], [1]):
        target = HFTarget(model, 3, 12)
        target.prefill(tokens[:, :8], lengths)
        target.run_only(rows)
        for step in range(3):
            output = target.forward(tokens[:, 8 + step, None], mask, depths)
            active = torch.zeros(3, dtype=torch.bool)
            active[rows] = True
            target.commit(nothing, torch.zeros(3, dtype=torch.int32), active)
        assert target.prefix_len.tolist() == [n + 3 * (row in rows) for row, n in enumerate(lengths.tolist())]
        outputs.append(output)
    for rows, output in zip(([0, 2], [1]), outputs[1:], strict=True):
        torch.testing.assert_close(output.logits[rows], outputs[0].logits[rows])
        torch.testing.assert_close(output.hidden[rows], outputs[0].hidden[rows])


def test_a_new_prefill_runs_all_rows_again(model):
    target = HFTarget(model, 2, 8)
    ids, lengths = torch.tensor([[5, 6], [7, 8]]), torch.tensor([2, 2], dtype=torch.int32)
    first = target.prefill(ids, lengths).logits
    target.run_only([1])
    assert torch.equal(target.prefill(ids, lengths).logits, first)


class Alternating:
    """Plain steps and whole drafts in turn."""

    def __init__(self):
        self.steps = 0

    def choose(self, num_rows, context_len):
        self.steps += 1
        return 1 if self.steps % 2 else 64


def test_kangaroo_keeps_its_cache_through_plain_steps(model):
    """The adapter is the model's last layer: while its rows are right, all that it drafts is accepted."""
    drafter, stats = hopping(model, model.config.num_hidden_layers - 1, max_drafts=3), DecodeStats()
    options = {"max_new_tokens": 1 + 5 * 3, "do_sample": False}
    generate(model, **BATCHES["B1"], drafter=drafter, budget=Alternating(), stats=stats, **options)
    assert stats.accepted_histogram == [3, 0, 0, 3]


def test_a_draft_model_catches_up_after_plain_steps(model):
    """The draft model is the target: while its cache is right, all that it drafts is accepted."""
    calls, stats = [], DecodeStats()

    def make_draft(batch_size, capacity):
        draft = HFTarget(model, batch_size, capacity)
        draft.forward, recorded = record_calls(draft.forward)
        calls.append(recorded)
        return draft

    drafter = DraftModelDrafter(make_draft, max_drafts=3, exit_rule=ALWAYS)
    options = {"max_new_tokens": 1 + 5 * 3, "do_sample": False}
    generate(model, **BATCHES["B1"], drafter=drafter, budget=Alternating(), stats=stats, **options)
    assert stats.accepted_histogram == [3, 0, 0, 3]
    # In each of the three steps with drafts one to catch up and two to draft; in the others none.
    assert [len(recorded) for recorded in calls] == [9]


def folder_with(model, path, *, drafters=("medusa", "medusa+ngram"), prepared=False):
    """Write heads and what they were measured to cost: two nodes are the fastest, a step of more takes an hour."""
    medusa(model).save_pretrained(path)
    save_calibration(model, path, drafters, prepared)
    return path


def save_calibration(model, path, drafters, prepared=False):
    steps = CostTable([[1, 16, 1, 1000.0], [1, 16, 2, 1000.0], [1, 16, 3, 3.6e9]])
    profile = DrafterProfile([1.0, 1.0, 1.0], [0, 0, 0, 1], CostTable([[1, 16, 1, 1.0]]), 1)
    setting = Setting.here(model.device, model.dtype, prepared=prepared)
    Calibration(setting, steps, dict.fromkeys(drafters, profile)).save(path)


@pytest.mark.parametrize("merges", [False, True], ids=["medusa", "medusa+ngram"])
def test_auto_is_the_calibration_beside_the_heads(model, merges, tmp_path):
    drafter = MedusaDrafter.from_pretrained(folder_with(model, tmp_path), model)
    whole = drafter.max_nodes
    drafter = MergedDrafter(drafter, NGramDrafter()) if merges else drafter
    assert whole > 2
    assert widest_draft(model, drafter) == 2


def widest_draft(model, drafter):
    """Generate with the budget that is found by itself, and return the nodes of the widest draft."""
    sizes, propose = [], drafter.propose
    drafter.propose = lambda pending: sizes.append((draft := propose(pending)).ids.shape[1]) or draft
    options = {"max_new_tokens": NEW, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = generate(model, **BATCHES["B1"], drafter=drafter, budget="auto", **options)
    assert torch.equal(ours, model.generate(**BATCHES["B1"], **options))
    return max(sizes)


@pytest.mark.parametrize("name", ["kangaroo", "kangaroo-tree", "kangaroo-tree+ngram", "layer-skip"])
def test_auto_is_the_calibration_beside_an_adapter_or_skip_sets(model, name, tmp_path):
    if name == "layer-skip":
        LayerSkipDrafter([1], [1]).save_pretrained(tmp_path)
        drafter = LayerSkipDrafter.from_pretrained(tmp_path, exit_rule=NO_EXIT)
    else:
        adapter_for(model, 1).save_pretrained(tmp_path)
        tree = TREE if "tree" in name else None
        drafter = KangarooDrafter.from_pretrained(tmp_path, model, tree=tree, exit_rule=NO_EXIT)
    save_calibration(model, tmp_path, [name])
    assert widest_draft(model, MergedDrafter(drafter, NGramDrafter()) if "+" in name else drafter) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drafters": ()}, "no drafter 'medusa' was measured"),
        ({"prepared": True}, "has nothing for .*, not prepared; it has .*, prepared"),
        (None, "there is no .*calibrat"),
    ],
)
def test_auto_leaves_drafts_whole_where_nothing_was_measured(model, options, reason, tmp_path):
    medusa(model).save_pretrained(tmp_path)
    if options is not None:
        folder_with(model, tmp_path, **options)
    drafter = MedusaDrafter.from_pretrained(tmp_path, model)
    with pytest.warns(UserWarning, match=f"leaves drafts whole: .*{reason}"):
        generate(model, **BATCHES["B1"], drafter=drafter, budget="auto", max_new_tokens=3, do_sample=False)


def test_auto_needs_heads_from_a_folder(model):
    with pytest.warns(UserWarning, match="nothing of ngram was loaded"):
        generate(model, **BATCHES["B1"], drafter=NGramDrafter(), budget="auto", max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match="budget must be 'auto'"):
        generate(model, **BATCHES["B1"], drafter=NGramDrafter(), budget="best", max_new_tokens=3, do_sample=False)
