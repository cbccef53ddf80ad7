"""Small settings with answers known by hand, each a kind of fault seen in verification code elsewhere."""

import pytest
import torch

from specdec_kernels import verify_chain, verify_tree, verify_tree_greedy, verify_tree_typical
from specdec_kernels.reference._verify_probs import residual

from ..conftest import INTERPRETED
from .test_verify import CALLS, make_inputs

# Doubles do not reach the Triton kernels.
LOGITS = torch.float32 if INTERPRETED else torch.float64
TINY, ALMOST_ONE = 2.0**-24, 1 - 2.0**-24
# Target, drafter; accepted with 1, .5, 1, 0; residual [.75, 0, .25, 0].
P1, Q1 = [0.5, 0.3, 0.2, 0.0], [0.2, 0.6, 0.1, 0.1]
# Siblings without replacement; 0 is accepted with 5/6, then only 2 can be.
P2, Q2 = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]


def logits(*rows):
    return torch.tensor([rows], dtype=torch.float64).log().to(LOGITS)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def uniforms(*values):
    return torch.tensor([values], dtype=torch.float64)


def chain(ids, p, q, u, temperature=1.0, **options):
    return verify_chain(torch.tensor([ids]), p, q, torch.tensor([temperature]), uniforms(*u), **options)


def tree(ids, parents, p, q, u, temperature=1.0, **options):
    parents = int32(*parents)[None]
    return verify_tree(torch.tensor([ids]), parents, p, q, torch.tensor([temperature]), uniforms(*u), **options)


@pytest.mark.parametrize(("x", "chance"), [(0, 1.0), (1, 0.5), (2, 1.0), (3, 0.0)])
@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_chance_of_acceptance_with_true_q(backend, x, chance, block):
    for u in (0.0, TINY, 0.499, 0.501, ALMOST_ONE):
        result = chain([x], logits(P1, P1), logits(Q1), (0.5, u), block=block)
        assert result.num_accepted.item() == (u < chance), u


@pytest.mark.parametrize(("x", "chance"), list(enumerate(P1)))
def test_chance_of_acceptance_of_chosen_drafts(backend, x, chance):
    for u in (0.0, TINY, 0.199, 0.201, 0.299, 0.301, 0.499, 0.501, ALMOST_ONE):
        assert chain([x], logits(P1, P1), None, (0.5, u)).num_accepted.item() == (u < chance), u


def test_probability_zero_is_never_accepted(backend):
    """Not by ``<=`` either, when the uniform is 0."""
    one_hot = logits([0.0, 1.0, 0.0])
    for q in (None, one_hot.flip(-1), logits([1.0, 0.0, 0.0])):
        for block in (False, True):
            result = chain([0], torch.cat([one_hot, one_hot], 1), q, (0.5, 0.0), block=block)
            assert result.output_ids.tolist() == [[1, -1]]


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_recovered_token_is_drawn_from_the_normalised_residual(backend, block):
    """Token 1 rejected: [.75, 0, .25, 0]. Not a softmax of it, not p."""
    for u, expected in ((0.0, 0), (0.7499, 0), (0.7501, 2), (ALMOST_ONE, 2)):
        result = chain([1], logits(P1, P1), logits(Q1), (u, 0.9), block=block)
        assert result.output_ids.tolist() == [[expected, -1]]


def test_chosen_draft_rejected_leaves_the_rest_of_p(backend):
    """A beam's or an argmax's token is no sample of q: accepted with .5, then [0, .6, .4]."""
    assert chain([0], logits(P2, P2), None, (0.5, 0.499)).num_accepted.item() == 1
    for u, expected in ((0.0, 1), (0.599, 1), (0.601, 2), (ALMOST_ONE, 2)):
        assert chain([0], logits(P2, P2), None, (u, 0.501)).output_ids.tolist() == [[expected, -1]]


def test_siblings_without_replacement(backend):
    rows, laws = logits(P2, P2, P2), logits(Q2, Q2, Q2)
    assert tree([9, 0, 1], (-1, 0, 0), rows, laws, (0.5, 0.833, 0.0)).accepted.tolist() == [[1, -1]]
    assert tree([9, 0, 1], (-1, 0, 0), rows, laws, (0.5, 0.834, 0.0)).output_ids.tolist() == [[2, -1, -1]]
    assert tree([9, 0, 2], (-1, 0, 0), rows, laws, (0.5, 0.834, ALMOST_ONE)).accepted.tolist() == [[2, -1]]


def test_duplicate_sibling_gets_no_second_chance(backend):
    rows = logits(P2, P2, P2)
    assert tree([9, 0, 0], (-1, 0, 0), rows, None, (0.0, 0.6, 0.0)).output_ids.tolist() == [[1, -1, -1]]


def test_one_uniform_for_one_decision(backend):
    """The final draw moves nothing but the final token; a later node's uniform moves nothing before it."""
    for name in ("chain", "block", "tree", "tree-chosen"):
        op, options, arguments = CALLS[name]
        inputs = arguments(make_inputs(6, 9, 17))
        before = op(**inputs, **options)
        changed = inputs | {"uniforms": inputs["uniforms"].clone()}
        changed["uniforms"][:, 0] = torch.rand(6)
        assert torch.equal(op(**changed, **options).accepted, before.accepted), name
        changed["uniforms"][:, 5:] = torch.rand(6, 4)
        if name != "block":
            after = op(**changed, **options)
            kept = (before.accepted < 5) & (before.accepted >= 0)
            assert torch.equal(after.accepted[kept], before.accepted[kept]), name


def test_nothing_after_the_first_rejection_counts(backend):
    right, wrong = [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]
    result = chain([1, 1, 1], logits(right, wrong, right, right), None, (0.5, 0.5, 0.5, 0.5))
    assert result.num_accepted.tolist() == [1]
    assert result.output_ids.tolist() == [[1, 0, -1, -1]]
    assert result.accepted.tolist() == [[1, -1, -1]]


def test_replacement_stands_where_the_rejection_was(backend):
    """For typical acceptance too, not only at the first place."""
    p = logits([0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    ids, parents = torch.tensor([[9, 1, 1, 1]]), int32(-1, 0, 1, 2)[None]
    result = verify_tree_typical(ids, parents, p, torch.ones(1), uniforms(0.5, 0, 0, 0), epsilon=0.09, delta=0.3)
    assert result.output_ids.tolist() == [[1, 1, 0, -1]]


def test_first_draft_is_verified(backend):
    assert chain([2], logits([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]), None, (0.5, 0.0)).output_ids.tolist() == [[1, -1]]


def test_children_are_judged_by_their_parents_row(backend):
    """Parents [-1,0,0,1,1,2]: each row of the target wants another token, and only the right rows give path 2, 5."""
    rows = torch.full((1, 6, 6), -torch.inf)
    for node, wanted in enumerate([4, 3, 5, 0, 1, 2]):
        rows[0, node, wanted] = 0
    parents = int32(-1, 0, 0, 1, 1, 2)[None]
    result = verify_tree_greedy(torch.tensor([[9, 3, 4, 0, 1, 5]]), parents, rows)
    assert result.accepted.tolist() == [[2, 5, -1, -1, -1]]
    assert result.output_ids.tolist() == [[4, 5, 2, -1, -1, -1]]


@pytest.mark.parametrize("parents", [(-1,), (-1, 0, 0, 0)], ids=["root-alone", "flat"])
def test_shallow_trees(backend, parents):
    num_nodes = len(parents)
    p = torch.zeros(1, num_nodes, 5)
    p[..., 3] = 9
    result = verify_tree_greedy(torch.tensor([[0, 1, 3, 3][:num_nodes]]), int32(*parents)[None], p)
    assert result.accepted.tolist() == [[2, -1, -1][: num_nodes - 1]]
    assert result.output_ids.tolist() == [[3, 3, -1, -1] if num_nodes > 1 else [3]]


def test_short_rows(backend):
    """Rows with fewer drafts, none at all, and −1 for ids that are not there."""
    p = logits(*[[0.1, 0.2, 0.3, 0.4]] * 6).expand(3, 6, 4)
    ids = torch.tensor([[1, 0, 1, -1, -1], [-1, -1, -1, -1, -1], [3, -1, 3, 3, 3]])
    u = torch.tensor([[0.99, 0.0, 0.0, 0.0, 0.0, 0.0]]).expand(3, 6)
    for block in (False, True):
        result = verify_chain(ids, p, p[:, :5], torch.ones(3), u, int32(3, 0, 5), block=block)
        assert result.output_ids.tolist() == [[1, 0, 1, 3, -1, -1], [3, *[-1] * 5], [3, 3, -1, -1, -1, -1]]
        assert result.num_accepted.tolist() == [3, 0, 1]


def test_filtered_tokens(backend):
    """A token that top-p or a bias set to −inf is never accepted and never drawn."""
    p = torch.randn(64, 2, 9)
    p[:, :, 4] = -torch.inf
    u = torch.rand(64, 2)
    u[:32, 1] = 0
    for q in (None, torch.randn(64, 1, 9)):
        result = verify_chain(torch.full((64, 1), 4), p, q, torch.ones(64), u)
        assert result.num_accepted.sum() == 0
        assert not (result.output_ids == 4).any()


def test_zero_residual_falls_back_to_p(backend):
    """Where p == q nothing is rejected, and what rounding might reject is replaced by a token of p."""
    p = logits([0.25, 0.75, 0.0], [0.25, 0.75, 0.0])
    for x in (0, 1):
        assert chain([x], p, p[:, :1], (0.5, ALMOST_ONE)).num_accepted.item() == 1
    probs = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    assert torch.equal(residual(probs, probs + 1e-17, torch.tensor([True])), probs)


def test_temperatures(backend):
    """Below 1e-5 is greedy, 0 included; such rows share a batch with sampled ones, in fp16 at its largest logits."""
    p = torch.tensor([65504.0, 65472.0, -65504.0]).half().expand(6, 2, 3)
    temperature = torch.tensor([0.0, 1e-7, 9e-6, 1e-4, 32.0, 1e30])
    u = torch.tensor([[0.9, 0.9]]).expand(6, 2)
    result = verify_chain(torch.ones(6, 1, dtype=torch.int64), p, p[:, :1], temperature, u)
    # exp(-32 / 32) / (1 + exp(-1)) = 0.27: drawn honestly, token 1 is accepted; greedy rows want 0.
    assert result.num_accepted.tolist() == [0, 0, 0, 0, 1, 1]
    assert result.output_ids[:, 0].tolist() == [0, 0, 0, 0, 1, 1]
    assert result.output_ids[4:, 1].tolist() == [1, 2]


def test_greedy_begins_below_a_hundred_thousandth(backend):
    """A tie tells: greedy takes the lowest id, sampling tosses a coin."""
    tie = torch.zeros(4, 1, 2)
    temperature = torch.tensor([0.0, 1e-6, 9.9e-6, 1.1e-5])
    empty = torch.zeros(4, 0, dtype=torch.int64)
    result = verify_chain(empty, tie, None, temperature, torch.full((4, 1), 0.9))
    assert result.output_ids[:, 0].tolist() == [0, 0, 0, 1]
