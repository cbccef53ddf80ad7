"""The native CPU kernels where a uniform lies next to the boundary of a decision: the reference's side of it."""

import pytest
import torch

from specdec_kernels import verify_chain
from specdec_kernels.reference._verify_probs import residual

from ..marks import needs_native

pytestmark = needs_native


def uniforms_around(boundary):
    """Return uniforms 2 fp32 steps below and above a boundary, where agreement is owed again, ``(2, …) float64``."""
    step = 2 * 2.0**-24
    return torch.stack([torch.as_tensor(boundary, dtype=torch.float64) + sign * step for sign in (-1, 1)])


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize("vocab", [5, 32000])
def test_boundary_of_a_decision(isa, vocab, drawn):
    """Just inside accepts, just outside rejects; at the boundary itself either may happen, but nothing else."""
    logits, draft = 2 * torch.randn(2, 1, 2, vocab)
    p, q = logits[0, 0].double().softmax(-1), draft[0, 0].double().softmax(-1)
    x = int(torch.where(p < q, q, 0).argmax()) if drawn else int(p.argmax())
    boundary = (p[x] / q[x]).item() if drawn else p[x].item()
    below, above = uniforms_around(boundary)
    law = draft[:, :1] if drawn else None
    counts = []
    for u in (below, torch.tensor(boundary, dtype=torch.float64), above):
        result = verify_chain(torch.tensor([[x]]), logits, law, torch.ones(1), torch.stack([u * 0 + 0.3, u])[None])
        counts.append(result.num_accepted.item())
        assert 0 <= result.output_ids[0, 0] < vocab
    assert (counts[0], counts[2]) == (1, 0)


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_boundary_where_rounding_errors_add_up(isa, drawn):
    """A flat row errs in the same direction at every id, so a sum in fp32 is off by far more than 2 steps."""
    rows = torch.linspace(-12, -8, 20)[:, None].repeat(1, 32_000)
    rows[:, 5] = 0
    target, law = rows, (rows * 1.2 if drawn else None)
    boundary = target.double().softmax(-1)[:, 5]
    if drawn:
        boundary = boundary / law.double().softmax(-1)[:, 5]
    u = torch.stack([torch.full((40,), 0.5), uniforms_around(boundary).flatten()], dim=1)
    laws = law.repeat(2, 1)[:, None] if drawn else None
    ids, targets = torch.full((40, 1), 5), target.repeat(2, 1)[:, None].expand(40, 2, -1)
    assert verify_chain(ids, targets, laws, torch.ones(40), u).num_accepted.tolist() == [1] * 20 + [0] * 20


@pytest.mark.parametrize("vocab", [17, 4096, 32000])
@pytest.mark.parametrize("after_rejection", [False, True], ids=["bonus", "residual"])
def test_boundary_of_the_final_draw(isa, vocab, after_rejection):
    logits, draft = 2 * torch.randn(2, 1, 2, vocab)
    p, q = logits[:, 0].double().softmax(-1), draft[:, 0].double().softmax(-1)
    x, count = int((q - p).argmax()), 1 if after_rejection else 0
    law = residual(p, q, torch.tensor([True]))[0] if after_rejection else p[0]
    cumulative = law.cumsum(0) / law.sum()
    token = int(torch.where(cumulative < 0.999, law, 0).argmax())
    assert law[token] > 1e-4
    for u, found in zip(uniforms_around(cumulative[token].item()), (True, False), strict=True):
        u = torch.stack([u, u * 0 + 1 - 2.0**-24])[None, : 1 + count]
        ids = torch.full((1, count), x)
        result = verify_chain(ids, logits[:, : 1 + count], draft[:, :count], torch.ones(1), u)
        assert result.num_accepted.item() == 0
        assert (result.output_ids[0, 0] == token) == found


def test_boundary_in_a_small_residual(isa):
    """p and q differ by 1 %: what is off in their sums is a hundred times as much of what is left."""
    p = torch.full((1, 2, 32_000), -9.3)
    p[..., 0] = 0
    q = p[:, :1] + torch.linspace(-0.01, 0.01, 32_000)
    law = residual(p[:, 0].double().softmax(-1), q[:, 0].double().softmax(-1), torch.tensor([True]))[0]
    boundary = law.cumsum(0)[5000].item()
    for u, token in zip(uniforms_around(boundary), (5000, 5001), strict=True):
        u = torch.stack([u, u * 0 + 1 - 2.0**-24])[None]
        result = verify_chain(torch.tensor([[30_000]]), p, q, torch.ones(1), u)
        assert result.output_ids.tolist() == [[token, -1]]


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("last", [-1.0, -3.0, -6.0])
def test_uniform_next_to_one_behind_a_rejected_last_id(isa, block, last):
    """Id 7000, alone in its block of ids, was rejected: what subtraction leaves of the block's sum is no id's."""
    logits = torch.full((20, 2, 8192), -torch.inf)
    logits[..., 5] = 0
    logits[..., 7000] = last + torch.arange(20)[:, None] / 7
    drafts = torch.full((20, 1), 7000)
    uniforms = torch.full((20, 2), 1 - 2.0**-53, dtype=torch.float64)
    result = verify_chain(drafts, logits, None, torch.ones(20), uniforms, block=block)
    assert result.output_ids.tolist() == [[5, -1]] * 20
