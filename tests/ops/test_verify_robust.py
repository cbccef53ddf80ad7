"""Adversarial rows, shapes and memory: what may not crash, leak between rows, or leave the vocabulary."""

import pytest
import torch

from specdec_kernels import Verification, verify_chain, verify_tree, verify_tree_greedy, verify_tree_typical
from specdec_kernels._ops import ops

from .test_verify import CALLS, assert_same, make_inputs

TINY, ALMOST_ONE = 2.0**-24, 1 - 2.0**-24
BAD_ROWS = {
    "nan": lambda row: row.index_fill_(0, torch.tensor([row.shape[0] - 1]), torch.nan),
    "all-nan": lambda row: row.fill_(torch.nan),
    "plus-inf": lambda row: row.index_fill_(0, torch.tensor([0]), torch.inf),
    "only-minus-inf": lambda row: row.fill_(-torch.inf),
}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def run(name, inputs):
    op, options, arguments = CALLS[name]
    return op(**arguments(inputs), **options)


def rows_of(result, rows):
    return Verification(*(tensor[rows] for tensor in result))


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("name", CALLS)
def test_unreadable_row_is_reported_alone(backend, name, kind):
    inputs = make_inputs(5, 7, 11)
    inputs["num_nodes"].fill_(7)
    expected = run(name, inputs)
    # Row 1 is greedy and row 2 is not: both need the target's root row.
    for row in (1, 2):
        BAD_ROWS[kind](inputs["target_logits"][row, 0])
    result = run(name, inputs)
    others = torch.tensor([0, 3, 4])
    assert_same(rows_of(result, others), rows_of(expected, others))
    for row in (1, 2):
        assert result.num_accepted[row] == 0
        assert (result.output_ids[row] == -1).all()
        assert (result.accepted[row] == -1).all()


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("name", ["chain", "block", "tree", "tree-chosen", "greedy", "typical"])
def test_unreadable_row_of_an_accepted_node(backend, name, kind):
    """The row after the last accepted draft makes the final draw: the drafts before it are not returned either."""
    inputs = make_inputs(3, 2, 11)
    inputs["target_logits"][:, 0] = 0
    inputs["target_logits"][:, 0, 4] = 50
    inputs["draft_logits"][:, 0] = inputs["target_logits"][:, 0]
    inputs["ids"].fill_(4)
    inputs["num_nodes"].fill_(2)
    assert run(name, inputs).num_accepted.tolist() == [1, 1, 1]
    BAD_ROWS[kind](inputs["target_logits"][1, 1])
    BAD_ROWS[kind](inputs["target_logits"][2, 1])
    result = run(name, inputs)
    assert result.num_accepted.tolist() == [1, 0, 0]
    assert (result.output_ids[1:] == -1).all()


@pytest.mark.parametrize("name", ["tree", "greedy", "typical"])
def test_parents_out_of_order_accept_nothing(backend, name):
    """Where values are not checked, a node whose parent is not before it is left out, and so is what hangs on it."""
    inputs = make_inputs(1, 5, 3)
    inputs["target_logits"] = inputs["draft_logits"] = torch.tensor([9.0, 0, 0]).expand(1, 5, 3)
    inputs["ids"].fill_(0)
    inputs["num_nodes"].fill_(5)
    inputs["parents"] = int32(-1, 3, 99, 0, 2)[None]
    op, options, arguments = CALLS[name]
    options = options | ({"with_replacement": False, "draft_vocab_map": None} if name == "tree" else {})
    result = getattr(ops, op.__name__).default(*arguments(inputs).values(), **options)
    assert result[0].tolist() == [[0, 0, -1, -1, -1]]
    assert result[2].tolist() == [[3, -1, -1, -1]]


def test_greedy_rows_need_no_uniforms_and_no_draft_logits(backend):
    """Called below the checks, which want uniforms in [0, 1) even there."""
    inputs = make_inputs(4, 7, 11)
    inputs["temperature"].fill_(0)
    args = CALLS["tree"][2](inputs)
    expected = verify_tree(**args)
    args["uniforms"] = torch.full_like(args["uniforms"], torch.nan)
    args["draft_logits"] = torch.full_like(args["draft_logits"], torch.nan)
    found = ops.verify_tree.default(*args.values(), with_replacement=False, draft_vocab_map=None)
    assert_same(found, expected)


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_unreadable_draft_row(backend, block, kind):
    """It matters where a draft drawn from it is judged, and not for greedy rows."""
    p = torch.randn(3, 2, 11)
    q = torch.randn(3, 1, 11)
    BAD_ROWS[kind](q[0, 0])
    BAD_ROWS[kind](q[1, 0])
    draft_len = int32(1, 1, 1)
    args = torch.zeros(3, 1, dtype=torch.int64), p, q, torch.tensor([1.0, 0.0, 1.0]), torch.rand(3, 2)
    result = verify_chain(*args, draft_len, block=block)
    assert result.output_ids[0].tolist() == [-1, -1]
    assert (result.output_ids[1:, 0] >= 0).all()
    draft_len[0] = 0
    assert verify_chain(*args, draft_len, block=block).output_ids[0, 0] >= 0


def test_unreadable_draft_row_of_a_small_vocabulary(backend):
    """Reported also where the draft is a token that the drafter does not have."""
    q = torch.tensor([[[0.0, torch.nan, 0.0]], [[0.0, 0.0, 0.0]]])
    ids, p = torch.tensor([[1], [1]]), torch.zeros(2, 2, 6)
    offsets = torch.tensor([0, 3, 3])
    result = verify_chain(ids, p, q, torch.ones(2), torch.full((2, 2), 0.5), draft_vocab_map=offsets)
    assert result.output_ids[0].tolist() == [-1, -1]
    assert result.output_ids[1, 0] >= 0


def test_rows_behind_a_rejection_are_not_looked_at(backend):
    p = torch.zeros(1, 4, 5)
    p[0, :, 3] = 30
    ids, parents = torch.tensor([[9, 3, 1, 2]]), int32(-1, 0, 0, 2)[None]
    expected = verify_tree_greedy(ids, parents, p)
    p[0, 2:] = torch.nan
    assert_same(verify_tree_greedy(ids, parents, p), expected)
    q = torch.full_like(p, torch.nan)
    q[0, 0] = 0
    u = torch.full((1, 4), 0.5)
    assert_same(verify_tree(ids, parents, p, q, torch.ones(1), u), expected)
    result = verify_chain(torch.tensor([[1, 2, 3]]), p, q[:, :3], torch.ones(1), u)
    assert result.output_ids.tolist() == [[3, -1, -1, -1]]


@pytest.mark.parametrize("name", CALLS)
def test_slot_and_neighbours_do_not_matter(backend, name):
    """Each row alone, and all rows in another order, bit for bit."""
    inputs = make_inputs(7, 9, 101)
    together = run(name, inputs)
    order = torch.tensor([3, 6, 0, 2, 5, 1, 4])
    assert_same(run(name, {k: v[order] for k, v in inputs.items()}), rows_of(together, order))
    for row in range(7):
        alone = run(name, {k: v[row : row + 1] for k, v in inputs.items()})
        assert_same(alone, rows_of(together, [row]))


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_left_alone(backend, name):
    op, options, arguments = CALLS[name]
    inputs = arguments(make_inputs(4, 9, 33, torch.bfloat16))
    before = {k: None if v is None else v.clone() for k, v in inputs.items()}
    op(**inputs, **options)
    assert all(v is None or torch.equal(v, before[k]) for k, v in inputs.items())


@pytest.mark.parametrize("name", CALLS)
def test_any_row_stride(backend, name):
    """Logits cut out of a padded vocabulary and out of a longer batch of nodes; the rest is NaN."""
    inputs = make_inputs(4, 9, 33)
    strided = dict(inputs)
    for key in ("target_logits", "draft_logits"):
        roomy = torch.full((9, 6, 48), torch.nan)
        roomy[:, 1:5, 8:41] = inputs[key].transpose(0, 1)
        strided[key] = roomy[:, 1:5, 8:41].transpose(0, 1)
    strided["ids"] = torch.stack([inputs["ids"], inputs["ids"]], dim=2)[..., 0]
    assert_same(run(name, strided), run(name, inputs))


@pytest.mark.parametrize("name", CALLS)
def test_empty_batch_and_root_alone(backend, name):
    inputs = make_inputs(3, 5, 7)
    empty = run(name, {k: v[:0] for k, v in inputs.items()})
    assert [t.shape for t in empty] == [(0, 5), (0,), (0, 4)]
    alone = run(name, {k: v[:, :1] if v.dim() > 1 else v.clamp(max=1) for k, v in inputs.items()})
    assert [t.shape for t in alone] == [(3, 1), (3,), (3, 0)]
    assert (alone.output_ids >= 0).all()


@pytest.mark.parametrize("vocab", [1, 2, 7, 8193, 32000, 151936])
def test_ids_stay_in_the_vocabulary(backend, vocab):
    """All mass on the last token or on the first, whatever the uniform; a flat p at both ends."""
    for token in {0, vocab - 1}:
        p = torch.full((2, 1, vocab), -torch.inf)
        p[..., token] = 3
        u = torch.tensor([[TINY], [ALMOST_ONE]])
        empty = torch.zeros(2, 0, dtype=torch.int64)
        assert verify_chain(empty, p, None, torch.ones(2), u).output_ids.tolist() == [[token], [token]]
    flat = torch.zeros(2, 1, vocab)
    flat[..., -1] = -torch.inf if vocab > 2 else 0
    result = verify_chain(empty, flat, None, torch.ones(2), u)
    assert result.output_ids.tolist() == [[0], [vocab - 2 if vocab > 2 else vocab - 1]]


@pytest.mark.parametrize("vocab", [2, 7, 8193, 32000, 151936])
def test_recovered_token_stays_in_the_vocabulary(backend, vocab):
    """The residual has one token only: the last, or the first."""
    for token, drafted in ((vocab - 1, 0), (0, vocab - 1)):
        p = torch.full((2, 2, vocab), -torch.inf)
        p[..., [token, drafted]] = 0
        q = torch.full((2, 1, vocab), -torch.inf)
        q[..., drafted] = 0
        u = torch.tensor([[TINY, 0.9], [ALMOST_ONE, 0.9]])
        for law in (q, None):
            result = verify_chain(torch.full((2, 1), drafted), p, law, torch.ones(2), u)
            assert result.output_ids.tolist() == [[token, -1]] * 2


def test_ties_go_to_the_lowest_id(backend):
    p = torch.zeros(1, 2, 8193)
    p[0, 0, [5, 4096, 8192]] = 2
    p[0, 1] = -3
    parents = int32(-1, 0)[None]
    assert verify_tree_greedy(torch.tensor([[0, 5]]), parents, p).output_ids.tolist() == [[5, 0]]
    assert verify_tree_greedy(torch.tensor([[0, 4096]]), parents, p).output_ids.tolist() == [[5, -1]]


def test_row_offsets_beyond_two_to_the_31(backend):
    """Row 14136 at a vocabulary of 151936 starts behind 2^31; the memory is virtual but for a few bytes."""
    num_nodes, vocab = 14_137, 151_936
    p = torch.empty(num_nodes * vocab, dtype=torch.float16).as_strided((1, num_nodes, 4), (0, vocab, 1))
    p[0, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    p[0, -1] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    ids = torch.full((1, num_nodes), -1)
    ids[0, -1] = 1
    parents = torch.zeros(1, num_nodes, dtype=torch.int32)
    parents[0, 0] = -1
    result = verify_tree_greedy(ids, parents, p)
    assert result.output_ids[0, :3].tolist() == [1, 3, -1]
    assert result.accepted[0, 0] == num_nodes - 1


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chain_is_a_tree_without_branches(backend, dtype, drawn):
    inputs = make_inputs(6, 9, 17, dtype) | {"parents": torch.arange(-1, 8, dtype=torch.int32)[None]}
    if not drawn:
        inputs["draft_logits"] = None
    tree = verify_tree(**inputs)
    names = ("temperature", "uniforms")
    draft = inputs["draft_logits"][:, :-1] if drawn else None
    chain_args = inputs["ids"][:, 1:], inputs["target_logits"], draft, *(inputs[n] for n in names)
    assert_same(verify_chain(*chain_args, (inputs["num_nodes"] - 1).clamp(min=0)), tree)
    assert tree.num_accepted.max() > 0


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_draft_vocabulary(backend, block):
    """Offsets: draft ids 0, 1, 2 are the target's 0, 4, 5. Equal to draft logits spread over the target's ids."""
    offsets = torch.tensor([0, 3, 3])
    small, p = torch.randn(40, 2, 3), torch.randn(40, 3, 6)
    wide = torch.full((40, 2, 6), -torch.inf)
    wide[..., [0, 4, 5]] = small
    ids = torch.tensor([0, 4, 5])[torch.randint(3, (40, 2))]
    rest = torch.ones(40), torch.rand(40, 3)
    mapped = verify_chain(ids, p, small, *rest, block=block, draft_vocab_map=offsets)
    assert_same(mapped, verify_chain(ids, p, wide, *rest, block=block))
    zeros = torch.zeros(6, dtype=torch.int64)
    assert_same(verify_chain(ids, p, wide, *rest, block=block, draft_vocab_map=zeros), mapped)


def test_typical_takes_the_longest_path(backend):
    """p = [.5, .25, .125, .125]: the threshold .3 exp(−1.213) = .0892 lets all through, .15 the first two."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(1, 6, 4)
    ids, parents = torch.tensor([[9, 0, 1, 3, 1, 2]]), int32(-1, 0, 0, 2, 2, 1)[None]
    u = torch.full((1, 6), 0.6)

    def path(epsilon, delta, temperature=1.0):
        t = torch.tensor([temperature])
        result = verify_tree_typical(ids, parents, p, t, u, epsilon=epsilon, delta=delta)
        return result.accepted[0, : result.num_accepted].tolist()

    # Nodes 3, 4 and 5 are equally deep: the lowest wins.
    assert path(0.09, 0.3) == [2, 3]
    assert path(0.15, 1.0) == [2, 4]
    assert path(0.26, 1.0) == [1]
    assert path(0.51, 9.0) == []
    assert path(0.09, 0.3, temperature=0.0) == [1]
