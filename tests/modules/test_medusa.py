"""`MedusaHeads` as a module: what it computes, how it trains, what it refuses."""

import pytest
import torch
import torch.nn.functional as F

from specdec_kernels import medusa_project_topk
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.testing import assert_close_to_baseline


def random_heads(*sizes, **options) -> MedusaHeads:
    """Return heads with random weights (a fresh head's residual weights are zero)."""
    heads = MedusaHeads(*sizes, **options)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape) * heads.hidden_size**-0.5)
    return heads


def head_by_head(heads: MedusaHeads, hidden, lm_head=None):
    logits = []
    for head in range(heads.num_heads):
        x = hidden
        for layer in range(heads.num_layers):
            bias = None if heads.b_res is None else heads.b_res[head, layer]
            x = x + F.silu(F.linear(x, heads.w_res[head, layer], bias))
        logits.append(F.linear(x, lm_head if heads.w_out is None else heads.w_out[head]))
    return torch.stack(logits, dim=-2)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("num_layers", [0, 1, 2])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
def test_forward(own, num_layers, shape) -> None:
    heads = random_heads(3, num_layers, 8, 20, own_projection=own, bias=num_layers != 2)
    hidden, lm_head = torch.randn(shape), None if own else torch.randn(20, 8)
    logits = heads(hidden, lm_head)
    assert logits.shape == (*shape[:-1], 3, 20)
    torch.testing.assert_close(logits, head_by_head(heads, hidden, lm_head))
    states = heads.hidden_states(hidden)
    assert states.shape == (*shape[:-1], 3, 8)
    if not own:
        torch.testing.assert_close(F.linear(states, lm_head), logits)


def test_a_fresh_head_predicts_what_the_model_predicts() -> None:
    heads, hidden, lm_head = MedusaHeads(4, 2, 8, 20), torch.randn(6, 8), torch.randn(20, 8)
    torch.testing.assert_close(heads(hidden, lm_head), F.linear(hidden, lm_head)[:, None].expand(6, 4, 20))


def test_a_fresh_own_projection_is_finite_and_varied() -> None:
    heads = MedusaHeads(2, 1, 8, 20, own_projection=True)
    assert heads.w_out.isfinite().all()
    assert not torch.equal(heads.w_out[0], heads.w_out[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
def test_topk_equals_topk_of_forward(own, dtype) -> None:
    heads = random_heads(3, 2, 16, 50, own_projection=own).to(dtype)
    hidden, lm_head = torch.randn(4, 16, dtype=dtype), None if own else torch.randn(50, 16, dtype=dtype)
    values, ids, lse = heads.topk(hidden, 7, lm_head)
    logits = heads(hidden, lm_head).detach()
    exact = heads.double()(hidden.double(), None if own else lm_head.double()).detach()
    assert_close_to_baseline(values.to(dtype), exact.gather(-1, ids), logits.gather(-1, ids))
    assert_close_to_baseline(values.to(dtype), exact.topk(7).values, logits.topk(7).values)
    assert_close_to_baseline(lse, exact.logsumexp(-1), logits.float().logsumexp(-1))


def test_topk_goes_through_the_op() -> None:
    heads, hidden = random_heads(3, 1, 16, 50, own_projection=True), torch.randn(4, 16, requires_grad=True)
    with torch.no_grad():
        expected = medusa_project_topk(hidden, heads.w_res, heads.b_res, heads.w_out, 7)
    actual = heads.topk(hidden, 7)
    assert not any(t.requires_grad for t in actual)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
def test_topk_of_the_first_heads(own) -> None:
    heads = random_heads(3, 2, 16, 50, own_projection=own)
    hidden, lm_head = torch.randn(4, 16), None if own else torch.randn(50, 16)
    expected = heads.topk(hidden, 5, lm_head)
    actual = heads.topk(hidden, 5, lm_head, num_heads=2)
    torch.testing.assert_close(actual, tuple(t[:, :2] for t in expected))
    for num_heads in (0, 4):
        with pytest.raises(ValueError, match=r"num_heads must be in \[1, 3\], got"):
            heads.topk(hidden, 5, lm_head, num_heads=num_heads)


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
def test_reduced_vocabulary(own) -> None:
    """With a vocab_map the projection has one row for each entry, and topk speaks in full ids."""
    vocab_map = torch.tensor([40, 3, 17])
    heads = random_heads(2, 1, 8, 50, own_projection=own, vocab_map=vocab_map)
    hidden, full = torch.randn(4, 8), torch.randn(50, 8)
    lm_head = None if own else heads.select_rows(full)
    logits = heads(hidden, lm_head)
    assert logits.shape == (4, 2, 3)
    if not own:
        torch.testing.assert_close(logits, head_by_head(heads, hidden, full)[..., vocab_map])
    _, ids, _ = heads.topk(hidden, 3, lm_head)
    assert torch.equal(ids, vocab_map[logits.topk(3).indices])


def test_gradients() -> None:
    heads = random_heads(2, 2, 4, 5, own_projection=True, dtype=torch.float64)
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    inputs = (hidden, *heads.parameters())

    def logits(hidden, *_):
        return heads(hidden)

    assert torch.autograd.gradcheck(logits, inputs)


def test_a_fresh_head_learns() -> None:
    """Zero weights are no dead end: one step of SGD lowers the loss of every head."""
    heads, lm_head = MedusaHeads(3, 1, 8, 20), torch.randn(20, 8)
    hidden, labels = torch.randn(32, 8), torch.randint(20, (32, 3))

    def losses():
        logits = heads(hidden, lm_head)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(32, 3).mean(0)

    before = losses()
    before.sum().backward()
    torch.optim.SGD(heads.parameters(), lr=0.1).step()
    assert (losses() < before).all()
    assert heads.w_res.grad.abs().amax((1, 2, 3)).min() > 0


def test_state_dict_round_trip() -> None:
    heads = random_heads(2, 1, 8, 50, own_projection=True, vocab_map=torch.tensor([4, 2]))
    other = MedusaHeads(2, 1, 8, 50, own_projection=True, vocab_map=torch.tensor([0, 1]))
    other.load_state_dict(heads.state_dict())
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(other.topk(hidden, 2), heads.topk(hidden, 2))


@pytest.mark.parametrize("shape", [(8,), (2, 5, 8), (0, 8)], ids=str)
def test_root_conditioned_heads_see_both(shape) -> None:
    heads, plain = random_heads(3, 2, 8, 20, root_conditioned=True), MedusaHeads(3, 2, 8, 20)
    plain.load_state_dict(heads.state_dict(), strict=False)
    hidden, root, lm_head = torch.randn(shape), torch.randn(shape), torch.randn(20, 8)
    normed = root / (root.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    both = F.linear(hidden, heads.w_root[:, :8], heads.b_root) + F.linear(normed, heads.w_root[:, 8:])
    expected = plain(hidden + F.silu(both), lm_head)
    torch.testing.assert_close(heads(hidden, lm_head, root), expected)
    torch.testing.assert_close(F.linear(heads.hidden_states(hidden, root), lm_head), expected)


def test_root_conditioned_topk_equals_topk_of_forward() -> None:
    heads = random_heads(3, 2, 16, 50, root_conditioned=True)
    hidden, root, lm_head = torch.randn(4, 16), torch.randn(4, 16), torch.randn(50, 16)
    logits = heads(hidden, lm_head, root).detach()
    values, ids, lse = heads.topk(hidden, 7, lm_head, root, num_heads=2)
    torch.testing.assert_close(values, logits[:, :2].topk(7).values)
    torch.testing.assert_close(lse, logits[:, :2].logsumexp(-1))
    assert torch.equal(ids, logits[:, :2].topk(7).indices)


def test_fresh_root_conditioned_heads() -> None:
    """They predict what the model predicts, and their first step learns from the root as well as from the state."""
    heads, lm_head = MedusaHeads(2, 1, 8, 20, root_conditioned=True), torch.randn(20, 8)
    hidden, root = torch.randn(32, 8), torch.randn(32, 8)
    logits = heads(hidden, lm_head, root)
    torch.testing.assert_close(logits, F.linear(hidden, lm_head)[:, None].expand(32, 2, 20))
    F.cross_entropy(logits[:, 0], torch.randint(20, (32,))).backward()
    assert heads.w_root.grad[:, :8].abs().max() > 0
    assert heads.w_root.grad[:, 8:].abs().max() > 0


@pytest.mark.parametrize(
    ("conditioned", "root", "message"),
    [
        (False, torch.zeros(3, 8), "are not root-conditioned: root must not be given"),
        (True, None, "are root-conditioned: root must be given"),
        (True, torch.zeros(1, 8), r"root must have shape \(3, 8\), got \(1, 8\)"),
    ],
    ids=["unwanted", "missing", "shape"],
)
def test_rejects_the_wrong_root(conditioned, root, message) -> None:
    heads, lm_head = MedusaHeads(2, 1, 8, 20, root_conditioned=conditioned), torch.zeros(20, 8)
    for use in (heads, lambda hidden, weight, root: heads.topk(hidden, 2, weight, root)):
        with pytest.raises(ValueError, match=message):
            use(torch.zeros(3, 8), lm_head, root)


@pytest.mark.parametrize(
    ("own", "vocab_map", "lm_head", "message"),
    [
        (True, None, torch.zeros(20, 8), "have their own projection: lm_head_weight must not be given"),
        (False, None, None, "have no projection of their own: lm_head_weight must be given"),
        (False, None, torch.zeros(19, 8), "lm_head_weight must have 20 rows, got 19"),
        (False, torch.tensor([1, 2]), torch.zeros(20, 8), r"must have 2 rows, got 20 .*select_rows"),
    ],
    ids=["unwanted", "missing", "rows", "not reduced"],
)
def test_rejects_the_wrong_projection(own, vocab_map, lm_head, message) -> None:
    heads = MedusaHeads(2, 1, 8, 20, own_projection=own, vocab_map=vocab_map)
    for use in (heads, lambda hidden, weight: heads.topk(hidden, 2, weight)):
        with pytest.raises(ValueError, match=message):
            use(torch.zeros(3, 8), lm_head)


def test_own_projection_needs_a_size() -> None:
    with pytest.raises(ValueError, match="own_projection needs vocab_size or vocab_map"):
        MedusaHeads(2, 1, 8, None, own_projection=True)
