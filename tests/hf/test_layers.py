"""Running a target in part: what comes out, what is cached, and what is not computed."""

import copy

import pytest
import torch

from specdec_kernels.decoding.protocols import LayerPlan
from specdec_kernels.hf import _chunks
from specdec_kernels.hf.families import FAMILIES
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents
from tests.hf.tiny import VOCAB, tiny_model

from .half_precision import equal_bits

PARENTS = [-1, 0, 0, 1, 1, 2]
TREES = {"tree": PARENTS, "chain": [-1, 0, 1, 2, 3, 4]}
LENGTHS = torch.tensor([5, 1, 11], dtype=torch.int32)  # some below a window of 6, some past it
EXIT = LayerPlan(stop=2)


def tree(parents):
    mask = mask_from_parents(torch.tensor([parents], dtype=torch.int32))
    return mask, depths_from_mask(mask)


def started(model, capacity=24):
    torch.manual_seed(0)
    target = HFTarget(model, len(LENGTHS), capacity)
    target.prefill(torch.randint(3, VOCAB, (len(LENGTHS), int(LENGTHS.max()))), LENGTHS)
    return target


def nodes():
    return torch.randint(3, VOCAB, (len(LENGTHS), len(PARENTS)), generator=torch.Generator().manual_seed(7))


def in_parts(target, ids, parts, plan, parents=PARENTS, **options):
    """Run the nodes of the tree in several forwards."""
    outputs, first = [], 0
    for count in parts:
        mask, depths = tree(parents[: first + count])
        part = slice(first, first + count)
        outputs.append(target.run_layers(ids[:, part], mask, depths[:, part], plan, first_node=first, **options))
        first += count
    return outputs


def by_rows(target):
    """All buffers as ``(B, S, Hk, D)``."""
    buffers = target.cache.buffers
    return buffers.transpose(2, 3).unbind() if isinstance(buffers, torch.Tensor) else buffers


WHERE = torch.arange(len(LENGTHS))[:, None], LENGTHS[:, None].long() + torch.arange(len(PARENTS))


def node_rows(target):
    """The rows of the step's nodes, for each buffer ``(B, T, Hk, D)``."""
    return [buffer[WHERE] for buffer in by_rows(target)]


def poison_node_rows(target):
    for buffer in by_rows(target):
        buffer[WHERE] = torch.nan


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_shallow_layers_node_by_node_and_deep_layers_at_once_are_a_forward(model_type, parents):
    target, ids = started(tiny_model(model_type)), nodes()
    whole = target.forward(ids, *tree(parents))
    rows = node_rows(target)
    poison_node_rows(target)
    outputs = in_parts(target, ids, [1, 2, 3], EXIT, parents)
    assert all(output.logits.shape == (3, 0, VOCAB) for output in outputs)
    hidden = torch.cat([output.hidden for output in outputs], dim=1)
    deep = target.run_layers(ids, *tree(parents), LayerPlan(start=2), hidden=hidden)
    for actual, expected in zip((*deep[:2], *node_rows(target)), (*whole[:2], *rows), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-4)


@equal_bits
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
@pytest.mark.parametrize("batch", [1, 3])
def test_in_bf16_parts_have_the_bits_of_the_whole(batch, parents):
    """Node by node up to the exit, also a lone one, then all at once."""
    target, ids = HFTarget(tiny_model().bfloat16(), batch, 24), nodes()[:batch]
    prompt = torch.randint(3, VOCAB, (batch, 9))
    target.prefill(prompt, torch.full((batch,), 9, dtype=torch.int32))
    whole = target.forward(ids, *tree(parents))
    hidden = torch.cat([output.hidden for output in in_parts(target, ids, [1] * 6, EXIT, parents)], dim=1)
    deep = target.run_layers(ids, *tree(parents), LayerPlan(start=2), hidden=hidden)
    assert torch.equal(deep.logits, whole.logits)
    assert torch.equal(deep.hidden, whole.hidden)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_skipped_block_is_one_that_gives_zero(model_type):
    model = tiny_model(model_type)
    zeroed = copy.deepcopy(model)
    layers = zeroed.model.layers
    for block in (layers[0].self_attn, layers[2].mlp, layers[1].self_attn, layers[1].mlp):
        for parameter in block.parameters():
            parameter.data.zero_()
    plan = LayerPlan(skipped_attention=frozenset([0, 1]), skipped_mlp=frozenset([1, 2]))
    ids = nodes()
    # The prefix is cached by the model as it is; so it must be in the other one.
    target, other = started(model), started(zeroed)
    for buffer, own in zip(by_rows(other), by_rows(target), strict=True):
        buffer.copy_(own)
    actual = target.run_layers(ids, *tree(PARENTS), plan)
    expected = other.forward(ids, *tree(PARENTS))
    assert (actual.logits - target.forward(ids, *tree(PARENTS)).logits).abs().max() > 0.01
    torch.testing.assert_close(actual.logits, expected.logits, atol=2e-5, rtol=2e-4)


def test_layers_outside_the_plan_compute_nothing_and_cache_nothing():
    model = tiny_model(num_hidden_layers=5)
    target, ids = started(model), nodes()
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, index=index: calls.append(f"attention {index}"))
        layer.mlp.register_forward_hook(lambda *_, index=index: calls.append(f"mlp {index}"))
    target.forward(ids, *tree(PARENTS))
    poison_node_rows(target)
    calls.clear()
    hidden = torch.randn(3, len(PARENTS), 64)
    plan = LayerPlan(1, 4, skipped_attention=frozenset([2]), skipped_mlp=frozenset([3]))
    output = target.run_layers(ids, *tree(PARENTS), plan, hidden=hidden)
    assert calls == ["attention 1", "mlp 1", "mlp 2", "attention 3"]
    is_written = [not rows.isnan().any() for rows in node_rows(target)]
    assert is_written == [layer in (1, 3) for layer in range(5) for _ in ("K", "V")]
    assert output.hidden.shape == hidden.shape
    calls.clear()
    target.forward(ids, *tree(PARENTS))
    assert len(calls) == 10, "the model is whole again"


def test_states_at_the_exit_are_those_of_the_model(monkeypatch):
    monkeypatch.setattr(_chunks, "PREFILL_CHUNK", 4)
    model = tiny_model()
    target = HFTarget(model, 1, 16)
    ids = torch.randint(3, VOCAB, (1, 11))
    target.tap(2)
    tapped = target.prefill(ids[:, :10], torch.tensor([10], dtype=torch.int32)).tapped
    expected = model(ids, output_hidden_states=True).hidden_states[2]
    torch.testing.assert_close(tapped, expected[:, :10])
    hidden = target.run_layers(ids[:, 10:], *tree([-1]), EXIT).hidden
    torch.testing.assert_close(hidden, expected[:, 10:])
    expected = tapped.clone()
    model(ids)
    target.prefill(ids[:, :9], torch.tensor([9], dtype=torch.int32))
    assert torch.equal(tapped, expected), "a tap is not fed by later forwards"


def test_reserved_rows_move_with_the_others():
    target, ids = started(tiny_model()), nodes()
    keys, values = target.reserve(1, 8)
    assert keys.shape == values.shape == (3, 24, 1, 8)
    target.forward(ids, *tree(PARENTS))
    rows = LENGTHS[:, None].long() + torch.arange(len(PARENTS))
    batch = torch.arange(3)[:, None]
    keys[batch, rows] = torch.arange(len(PARENTS), dtype=torch.float32)[:, None, None].expand(3, -1, 1, 8)
    values[batch, rows] = -keys[batch, rows]
    accepted = torch.tensor([[2, 5], [-1, -1], [1, 4]], dtype=torch.int32)
    target.commit(accepted, torch.tensor([2, 0, 2], dtype=torch.int32), torch.tensor([True, True, False]))
    moved = keys[batch, LENGTHS[:, None].long() + torch.arange(3)][:, :, 0, 0]
    assert moved.tolist() == [[0, 2, 5], [0, 1, 2], [0, 1, 2]]
    assert torch.equal(values[batch, rows], -keys[batch, rows])


def test_capacity_is_checked_before_anything_is_written():
    target, ids = started(tiny_model(), capacity=16), nodes()
    in_parts(target, ids[:, :5], [1, 2, 2], EXIT)
    before = [buffer.nan_to_num() for buffer in by_rows(target)]
    mask, depths = tree(PARENTS)
    with pytest.raises(ValueError, match="6 nodes after 11 rows need 17 rows, but the capacity is 16"):
        target.run_layers(ids[:, 5:], mask, depths[:, 5:], EXIT, first_node=5)
    assert all(map(torch.equal, before, [buffer.nan_to_num() for buffer in by_rows(target)]))


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (LayerPlan(stop=3), {}, r"0 <= start < stop < 3 .stop None: to the end., got start 0, stop 3"),
        (LayerPlan(start=2, stop=1), {}, "got start 2, stop 1"),
        (LayerPlan(start=3), {}, "got start 3, stop None"),
        (LayerPlan(skipped_mlp=frozenset([3])), {}, r"skipped_mlp must hold layers in \[0, 3\), got \[3\]"),
        (LayerPlan(skipped_attention=frozenset([-1])), {}, r"skipped_attention must hold .* got \[-1\]"),
        (LayerPlan(start=1), {}, r"hidden must have shape \(3, 6, 'C'\) with start 1, got None"),
        (LayerPlan(), {"hidden": torch.zeros(3, 6, 64)}, "hidden must be None with start 0"),
        (LayerPlan(), {"first_node": -1}, "first_node must be at least 0, got -1"),
    ],
    ids=["stop", "order", "start", "mlp", "attention", "no hidden", "hidden", "first node"],
)
def test_rejects(plan, options, message):
    target = started(tiny_model())
    with pytest.raises(ValueError, match=message):
        target.run_layers(nodes(), *tree(PARENTS), plan, **options)


def test_the_model_is_restored_when_it_fails():
    model = tiny_model()
    target, own = started(model), list(model.model.layers)

    def fail(*_):
        raise KeyError("from the model")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="from the model"):
        target.run_layers(nodes(), *tree(PARENTS), EXIT)
    handle.remove()
    assert list(model.model.layers) == own
    target.run_layers(nodes(), *tree(PARENTS), EXIT)
