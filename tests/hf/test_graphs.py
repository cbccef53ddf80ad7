"""Recorded steps: the states a shape goes through, and that nothing the host knew at recording time decides a replay.

There is no GPU here. A trace of the tensor operations stands in for the CUDA graph: replayed, it does to the same
memory what it did when it was recorded, whatever the lengths are by then.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from specdec_kernels.decoding.drafters import NGramDrafter
from specdec_kernels.hf import HFTarget
from specdec_kernels.hf.cache import TreeCache
from specdec_kernels.hf.generate import generate
from specdec_kernels.hf.graphs import StepGraphs, StepKey
from tests.decoding.test_budget import ByRows

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
