"""Recorded steps: the states a shape goes through, and that nothing the host knew at recording time decides a replay.

There is no GPU here. A trace of the tensor operations stands in for the CUDA graph: replayed, it does to the same
memory what it did when it was recorded, whatever the lengths are by then.
"""

import copy
from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from specdec_kernels.decoding.drafters import DraftModelDrafter, NGramDrafter
from specdec_kernels.decoding.exits import ExitRule
from specdec_kernels.hf import HFTarget
from specdec_kernels.hf.cache import TreeCache
from specdec_kernels.hf.generate import generate
from specdec_kernels.hf.graphs import StepGraphs, StepKey, attached_graphs
from specdec_kernels.hf.prepare import prepare, restore
from tests.decoding.test_budget import ByRows

from ..marks import needs_native
from .test_generate import BATCHES, NEW, eos_of, medusa, oracle
from .tiny import VOCAB, tiny_model

KEY = StepKey(1, 64, 1, 1)
SIZES = {4: 3, 3: 1, 2: 8, 1: 2}


class Recorder:
    """Traces a step, and counts recordings and replays."""

    def __init__(self):
        self.recorded, self.replays = [], 0

    def __call__(self, step, inputs):
        trace = make_fx(step)(*inputs)
        outputs = tuple(torch.empty_like(value) for value in step(*inputs))
        self.recorded.append(tuple(inputs[0].shape))

        @torch.no_grad()
        def replay():
            self.replays += 1
            for own, value in zip(outputs, trace(*inputs), strict=True):
                own.copy_(value)

        return outputs, replay


def graphs_of(**options):
    recorder = Recorder()
    return StepGraphs(capture=recorder, min_capacity=8, **options), recorder


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2)
    model.generation_config.eos_token_id = None
    return model


def test_a_shape_is_new_then_warm_then_recorded():
    graphs, recorder = graphs_of(warm_up=2)
    seen = []
    for value in range(5):
        seen.append((graphs.state(KEY), len(recorder.recorded), recorder.replays))
        (doubled,) = graphs.run(KEY, lambda x: (2 * x,), (torch.tensor([float(value)]),))
        assert doubled.tolist() == [2 * value]
    assert seen == [("new", 0, 0), ("new", 0, 0), ("warm", 0, 0), ("recorded", 1, 1), ("recorded", 1, 2)]
    assert graphs.state(KEY._replace(num_trees=2)) == "new"
    graphs.clear()
    assert graphs.state(KEY) == "new"


def test_a_failed_recording_is_told_and_tried_again():
    def fail(step, inputs):
        raise RuntimeError("a wait in the middle")

    graphs = StepGraphs(capture=fail, warm_up=1)
    graphs.run(KEY, lambda x: (x,), (torch.ones(1),))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a wait in the middle"):
            graphs.run(KEY, lambda x: (x,), (torch.ones(1),))
    assert graphs.state(KEY) == "warm"


def test_caches_come_in_few_capacities_and_are_kept():
    graphs, _ = graphs_of()

    def make(batch_size):
        return lambda rows: TreeCache(1, batch_size, rows)

    first = graphs.cache(make(2), 2, 9)
    assert first.capacity == 16
    assert graphs.cache(make(2), 2, 16) is first
    assert graphs.cache(make(2), 2, 17).capacity == 32
    assert graphs.cache(make(3), 3, 9) is not first
    assert graphs.cache(make(1), 1, 3).capacity == 8


@pytest.mark.parametrize(("name", "value"), [("warm_up", 0), ("min_capacity", 0)])
def test_rejects(name, value):
    with pytest.raises(ValueError, match=f"StepGraphs: {name} must be at least 1, got 0"):
        StepGraphs(**{name: value})


@pytest.mark.parametrize("family", ["gemma2", "llama", "qwen3"])
def test_a_replay_computes_with_the_lengths_of_its_own_step(family):
    """Also when all rows had one length at recording time, which the cache knows and writes by."""
    model, mask = tiny_model(family), torch.ones(1, 1, 1, dtype=torch.int64)
    tokens, depths = torch.randint(3, VOCAB, (2, 14)), torch.zeros(1, 1, dtype=torch.int32)
    graphs, recorder = graphs_of(warm_up=1)
    active, nothing = torch.ones(2, dtype=torch.bool), torch.empty(2, 0, dtype=torch.int32)
    for lengths in ([6, 6], [8, 3]):
        length = torch.tensor(lengths, dtype=torch.int32)
        targets = HFTarget(model, 2, 16), HFTarget(model, 2, 16, graphs=graphs)
        for target in targets:
            target.prefill(tokens[:, :8], length)
        for step in range(4):
            outputs = [target.forward(tokens[:, 8 + step, None], mask, depths) for target in targets]
            assert torch.equal(outputs[0].logits, outputs[1].logits)
            assert torch.equal(outputs[0].hidden, outputs[1].hidden)
            for target in targets:
                target.commit(nothing, torch.zeros(2, dtype=torch.int32), active)
    assert (recorder.recorded, recorder.replays) == ([(2, 1)], 3 + 4)


@pytest.mark.parametrize("batch", ["B1", "B4"])
def test_texts_are_those_without_recordings_and_later_calls_record_nothing_new(model, batch):
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos_of(model, "B4", 3, 8), "pad_token_id": 0}
    expected = model.generate(**BATCHES[batch], **options)
    graphs, recorder = graphs_of(warm_up=1)
    counts = []
    for _ in range(3):
        drafter = medusa(model)
        ours = generate(model, **BATCHES[batch], drafter=drafter, budget=ByRows(SIZES), graphs=graphs, **options)
        assert torch.equal(ours, expected)
        counts.append(len(recorder.recorded))
    assert counts[1] == counts[2] == len(set(recorder.recorded)) > 0
    assert recorder.replays > 3
    with_ngrams = generate(model, **BATCHES[batch], drafter=NGramDrafter(num_branches=2), graphs=graphs, **options)
    assert torch.equal(with_ngrams, expected)


def test_an_oracle_is_accepted_whole_through_recordings(model):
    """What it drafts lies in the cache: a replay that wrote one row beside its place would be found out."""
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = model.generate(**BATCHES["B4"], **options)
    graphs, recorder = graphs_of(warm_up=1, sizes=[9])
    for _ in range(2):
        ours = generate(model, **BATCHES["B4"], drafter=oracle(BATCHES["B4"], plain), graphs=graphs, **options)
        assert torch.equal(ours, plain)
    assert recorder.recorded == [(4, 9)]


def test_a_step_without_room_is_refused_as_ever(model):
    graphs, _ = graphs_of(warm_up=1)
    target = HFTarget(model, 1, 8, graphs=graphs)
    target.prefill(torch.tensor([[5] * 8]), torch.tensor([8], dtype=torch.int32))
    with pytest.raises(ValueError, match="1 nodes after 8 rows need 9 rows, but the capacity is 8"):
        target.forward(torch.tensor([[7]]), torch.ones(1, 1, 1, dtype=torch.int64), torch.zeros(1, 1).int())


class Prepared:
    """A prepared model whose steps are recorded by themselves on the CPU, as they are on a GPU."""

    def __init__(self, monkeypatch, model):
        monkeypatch.setattr("specdec_kernels.hf.graphs.RECORDED_DEVICES", ("cpu",))
        self.recorder = Recorder()
        self.model = prepare(model, graphs=StepGraphs(capture=self.recorder, warm_up=1))
        self.model.generation_config.eos_token_id = None

    def text(self, drafter=None):
        """Return a text, and how many recordings and replays it took."""
        counts = len(self.recorder.recorded), self.recorder.replays
        ids = generate(self.model, **BATCHES["B1"], drafter=drafter, max_new_tokens=8, do_sample=False)
        return ids, len(self.recorder.recorded) - counts[0], self.recorder.replays - counts[1]


def unrecorded(model):
    """Return the text of a model that was never prepared."""
    return generate(restore(copy.deepcopy(model)), **BATCHES["B1"], drafter=None, max_new_tokens=8, do_sample=False)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prepared_model_records_by_itself_until_it_is_restored(dtype, monkeypatch):
    prepared = Prepared(monkeypatch, tiny_model("llama", initializer_range=0.5).to(dtype))
    expected = generate(prepared.model, **BATCHES["B1"], drafter=None, max_new_tokens=8, do_sample=False)
    assert prepared.recorder.recorded == [(1, 1)]
    for _ in range(2):
        ids, recordings, replays = prepared.text()
        assert torch.equal(ids, expected)
        assert (recordings, replays) == (0, 7)
    other = copy.deepcopy(prepared.model)
    restore(prepared.model)
    assert prepared.text()[1:] == (0, 0)
    prepared.model = other
    assert prepared.text()[1:] == (1, 6)


@needs_native
def test_nothing_is_recorded_on_a_cpu(monkeypatch):
    prepared = Prepared(monkeypatch, tiny_model("llama"))
    monkeypatch.undo()
    prepared.text()
    assert prepared.recorder.recorded == []


@needs_native
def test_weights_that_lie_elsewhere_are_recorded_anew(monkeypatch):
    prepared = Prepared(monkeypatch, tiny_model("llama", initializer_range=0.5))
    prepared.text()
    with torch.no_grad():
        for parameter in prepared.model.parameters():
            parameter.mul_(-1.5)
    ids, recordings, _ = prepared.text()
    assert recordings == 0
    assert torch.equal(ids, unrecorded(prepared.model))
    weights = {name: weight.clone() * 1.5 for name, weight in prepared.model.state_dict().items()}
    prepared.model.load_state_dict(weights, assign=True)
    ids, recordings, _ = prepared.text()
    assert recordings == 1
    assert torch.equal(ids, unrecorded(prepared.model))


@needs_native
def test_hooks_are_called_where_steps_would_be_recorded(monkeypatch):
    prepared, seen = Prepared(monkeypatch, tiny_model("llama")), []
    prepared.text()
    handle = prepared.model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert prepared.text()[1:] == (0, 0)
    assert len(seen) == 8
    handle.remove()
    assert prepared.text()[2] == 7


@needs_native
def test_models_with_experts_are_not_recorded(monkeypatch):
    prepared = Prepared(monkeypatch, tiny_model("mixtral"))
    prepared.text()
    assert prepared.recorder.recorded == []


@needs_native
def test_models_that_look_at_their_positions_are_not_recorded(monkeypatch):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    prepared = Prepared(monkeypatch, tiny_model("llama", rope_parameters=rope))
    prepared.text()
    assert prepared.recorder.recorded == []


@needs_native
def test_a_target_begins_with_an_empty_cache(monkeypatch):
    """Its recordings' cache holds what another target left there."""
    prepared = Prepared(monkeypatch, tiny_model("llama"))
    prepared.text()
    target = HFTarget(prepared.model, 1, 16)
    assert target.cache.is_initialized
    assert target.prefix_len.tolist() == [0]


@needs_native
def test_a_failed_run_gives_its_recordings_back(monkeypatch):
    """At once: who catches the error may keep it, and with it the target."""
    prepared = Prepared(monkeypatch, tiny_model("llama"))
    with torch.no_grad():
        prepared.model.lm_head.weight[5] = torch.nan
    with pytest.raises(RuntimeError, match="are NaN") as error:
        prepared.text()
    assert attached_graphs(prepared.model, prepared) is not None, error


@needs_native
def test_drawn_drafts_keep_the_laws_of_recorded_steps(monkeypatch):
    """Each step of the draft model is written over the one before."""
    laws = []
    for prepares in (False, True):
        small = tiny_model("llama", initializer_range=0.5)
        small = Prepared(monkeypatch, small).model if prepares else small
        drafter, seen = DraftModelDrafter(partial(HFTarget, small), max_drafts=4, exit_rule=ExitRule(0.0, None)), []
        propose = drafter.propose
        monkeypatch.setattr(drafter, "propose", lambda ids, seen=seen, propose=propose: keep(propose(ids), seen))
        target = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2)
        options = {"max_new_tokens": 16, "do_sample": True, "top_k": 0, "seed": 3}
        generate(target, **BATCHES["B1"], drafter=drafter, **options)
        laws.append(seen)
    assert max(law.shape[1] for law in laws[0]) >= 4, "two recorded steps in one draft"
    for plain, recorded in zip(*laws, strict=True):
        torch.testing.assert_close(plain, recorded)


def keep(draft, seen):
    seen.append(draft.logits.clone())
    return draft


@needs_native
def test_a_model_that_drafts_for_itself_lends_its_recordings_once(monkeypatch):
    """To its target: the drafter's has a cache of its own. So it is when the drafter has outlived a call."""
    prepared = Prepared(monkeypatch, tiny_model("llama", initializer_range=0.5))
    expected = unrecorded(prepared.model)
    drafter = DraftModelDrafter(partial(HFTarget, prepared.model), max_drafts=2)
    for call in range(3):
        ids, _, replays = prepared.text(drafter)
        assert torch.equal(ids, expected)
        assert replays > 0, call


@needs_native
def test_a_draft_model_keeps_its_recordings_from_call_to_call(monkeypatch):
    prepared = Prepared(monkeypatch, tiny_model("llama", initializer_range=0.5))
    drafter = DraftModelDrafter(partial(HFTarget, prepared.model), max_drafts=2)
    target = tiny_model("llama", initializer_range=0.5, num_hidden_layers=2)
    target.generation_config.eos_token_id = None
    replays = []
    for _ in range(3):
        generate(target, **BATCHES["B1"], drafter=drafter, max_new_tokens=8, do_sample=False)
        replays.append(prepared.recorder.replays)
    assert 0 < replays[0] < replays[1] < replays[2]
