"""What steps take and what drafters bring, measured on tiny models; the clock is a fake where its values matter."""

import pytest
import torch

from specdec_kernels.decoding.drafters import NGramDrafter, PlainDrafter
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.training import step_costs
from specdec_kernels.training.step_costs import StepProbe, measure_steps, median_times, profile_drafter
from specdec_kernels.tree import DraftTree
from tests.decoding.toy import CheatingDrafter
from tests.hf.tiny import VOCAB, tiny_model

PROMPTS = [[5, 9, 40, 5, 9], [30, 31, 32]]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", initializer_range=0.5, num_hidden_layers=2)


def test_every_size_is_measured_but_those_with_too_many_rows(model, monkeypatch):
    monkeypatch.setattr(StepProbe, "time_us", lambda self, nodes: 100.0 * self._ids.shape[0] + nodes)
    table = measure_steps(model, nodes=(8, 1, 2, 4), batch_sizes=(4, 1), context_lens=(3,), max_rows=16, repeats=1)
    assert table.points == [
        *((1, 3, nodes, 100.0 + nodes) for nodes in (1, 2, 4, 8)),
        *((4, 3, nodes, 400.0 + nodes) for nodes in (1, 2, 4)),
    ]
    table = measure_steps(model, nodes=(4, 8, 16), batch_sizes=(8,), context_lens=(3,), max_rows=16, repeats=1)
    assert [point.num_nodes for point in table.points] == [4, 8]
    options = {"nodes": (1,), "batch_sizes": (1, 3, 9), "context_lens": (4, 8), "repeats": 1}
    table = measure_steps(model, max_tokens=24, **options)
    assert [point[:2] for point in table.points] == [(1, 4), (1, 8), (3, 4), (3, 8), (9, 4)]


def test_a_probe_runs_steps_of_any_size_and_commits_nothing(model, monkeypatch):
    sizes, forward = [], HFTarget.forward

    def recording(self, ids, tree_mask, depths):
        sizes.append((tuple(ids.shape), self.prefix_len.tolist()))
        return forward(self, ids, tree_mask, depths)

    monkeypatch.setattr(HFTarget, "forward", recording)
    probe = StepProbe(model, 2, 3, 9)
    assert all(probe.time_us(nodes) > 0 for nodes in (9, 1, 4))
    assert sizes == [((2, nodes), [3, 3]) for nodes in (9, 1, 4)]


def test_probes_take_turns_and_the_first_turns_do_not_count():
    order, times = [], iter([1000.0, 1000.0, 1000.0, 1000.0, 5.0, 1.0, 900.0, 2.0, 7.0, 3.0])

    def probe(name):
        def run():
            order.append(name)
            return next(times)

        return run

    assert median_times([probe("a"), probe("b")], repeats=3) == [7.0, 2.0]
    assert order == ["a", "b"] * 5


def test_a_profile_says_which_nodes_were_accepted(model):
    """An oracle on the last path of a tree: those nodes are accepted in every step that is not the last one."""
    tree = DraftTree.from_choices([[0], [1], [1, 0]])
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    plain = model.generate(torch.tensor([PROMPTS[0]]), **options)[0, len(PROMPTS[0]) :].tolist()
    drafter = CheatingDrafter(tree, [plain], VOCAB)
    profile = profile_drafter(model, drafter, PROMPTS[:1], max_new_tokens=1 + 3 * 4)
    assert (profile.gains, profile.widths, profile.num_steps) == ([1.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 4], 4)
    assert [point[:3] for point in profile.rest.points] == [(1, 5, 1), (1, 5, 2), (1, 5, 4)]


def test_a_profile_of_drafts_that_differ_in_width(model):
    profile = profile_drafter(
        model, NGramDrafter(max_drafts=4), PROMPTS, batch_sizes=(1, 2), max_new_tokens=12, eos_ids=[2]
    )
    assert len(profile.gains) == len(profile.widths) - 1 <= 5
    assert sum(profile.widths) == profile.num_steps
    assert {point.batch_size for point in profile.rest.points} == {1, 2}
    assert profile_drafter(model, PlainDrafter(), PROMPTS, max_new_tokens=4).gains == [1.0]


def test_the_rest_of_a_step_is_all_but_its_forward(model, monkeypatch):
    def fake(self, phase):
        self._stats.phase_time_us[phase] += {"forward": 1000.0, "prefill": 5000.0}.get(phase, 1.0)

    monkeypatch.setattr(step_costs.decode.__globals__["PhaseClock"], "lap", fake)
    profile = profile_drafter(model, PlainDrafter(), PROMPTS[:1], max_new_tokens=40)
    ((_, _, nodes, rest_us),) = profile.rest.points
    # Propose, verify, compact, and emit twice; the first and the last of the run once more.
    assert nodes == 1
    assert 5 <= rest_us < 6
