"""Rules of acceptance: each calls the right op with the right parts of a draft."""

import pytest
import torch

from specdec_kernels import Verification, verify_chain, verify_tree, verify_tree_greedy, verify_tree_typical
from specdec_kernels.decoding.acceptance import (
    GreedyAcceptance,
    RejectionAcceptance,
    TypicalAcceptance,
    emitted_logprobs,
)
from specdec_kernels.decoding.protocols import Draft

B, V = 4, 9
TREE = (-1, 0, 0, 1, 1, 2)
CHAIN = (-1, 0, 1, 2)


def make_draft(parents, *, drawn=True, num_nodes=None, vocab=V):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    num = len(parents)
    return Draft(
        ids=torch.randint(V, (B, num)),
        parents=torch.tensor([parents], dtype=torch.int32),
        tree_mask=torch.zeros(1, num, 1, dtype=torch.int64),
        depths=torch.tensor([depths], dtype=torch.int32),
        max_depth=max(depths),
        logits=torch.randn(B, num, vocab) if drawn else None,
        num_nodes=num_nodes,
        is_chain=parents == CHAIN,
    )


def judging(draft):
    """Return target logits that like about half of the drafts, temperatures and uniforms."""
    num = draft.ids.shape[1]
    logits = torch.randn(B, num, V)
    for node in range(1, num, 2):
        logits[:, draft.parents[0, node]].scatter_(1, draft.ids[:, node, None], 4.0)
    return logits, torch.tensor([0.0, 1.0, 0.5, 2.0]), torch.rand(B, num)


def assert_trimmed(actual, full, draft):
    """The op's result, cut to the longest path of the tree; what is cut off is padding."""
    longest = draft.max_depth
    assert actual.output_ids.shape == (B, longest + 1)
    assert actual.accepted.shape == (B, longest)
    assert torch.equal(actual.output_ids, full.output_ids[:, : longest + 1])
    assert torch.equal(actual.accepted, full.accepted[:, :longest])
    assert torch.equal(actual.num_accepted, full.num_accepted)
    assert (full.output_ids[:, longest + 1 :] == -1).all()
    assert all(t.is_contiguous() for t in actual)


NUM_NODES = torch.tensor([4, 0, 1, 3], dtype=torch.int32)


@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["all", "some"])
@pytest.mark.parametrize("parents", [TREE, CHAIN, (-1,)], ids=["tree", "chain", "root"])
def test_greedy(parents, num_nodes):
    draft = make_draft(parents, num_nodes=None if num_nodes is None else num_nodes.clamp(max=len(parents)))
    logits, temperature, uniforms = judging(draft)
    full = verify_tree_greedy(draft.ids, draft.parents, logits, draft.num_nodes)
    assert_trimmed(GreedyAcceptance()(draft, logits, temperature, uniforms), full, draft)


@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["all", "some"])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("with_replacement", [False, True])
def test_rejection(num_nodes, drawn, with_replacement):
    draft = make_draft(TREE, drawn=drawn, num_nodes=num_nodes)
    rest = judging(draft)
    full = verify_tree(
        draft.ids, draft.parents, rest[0], draft.logits, *rest[1:], num_nodes, with_replacement=with_replacement
    )
    assert_trimmed(RejectionAcceptance(with_replacement=with_replacement)(draft, *rest), full, draft)


@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["all", "some"])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
def test_block_verifies_chains_as_a_block(drawn, num_nodes):
    draft = make_draft(CHAIN, drawn=drawn, num_nodes=num_nodes)
    logits, temperature, uniforms = judging(draft)
    full = verify_chain(
        draft.ids[:, 1:],
        logits,
        draft.logits[:, :-1] if drawn else None,
        temperature,
        uniforms,
        None if num_nodes is None else (num_nodes - 1).clamp(min=0),
        block=True,
    )
    assert_trimmed(RejectionAcceptance(block=True)(draft, logits, temperature, uniforms), full, draft)


def test_block_leaves_a_tree_beside_a_chain_alone():
    """Three nodes and a depth of two, but only in the first rows: the last one has two siblings."""
    draft = make_draft((-1, 0, 1), drawn=False)
    draft = draft._replace(parents=torch.tensor([[-1, 0, 1]] * (B - 1) + [[-1, 0, 0]], dtype=torch.int32))
    logits, _, uniforms = judging(draft)
    logits[-1, 0, draft.ids[-1, 2]] = 20.0  # accepted below the root, which a chain never would
    draft.ids[-1, 1] = (draft.ids[-1, 2] + 1) % V
    verification = RejectionAcceptance(block=True)(draft, logits, torch.zeros(B), uniforms)
    assert verification.accepted[-1].tolist() == [2, -1]
    full = verify_tree(draft.ids, draft.parents, logits, None, torch.zeros(B), uniforms)
    assert_trimmed(verification, full, draft)


def test_block_leaves_trees_alone():
    draft = make_draft(TREE)
    rest = judging(draft)
    expected = RejectionAcceptance()(draft, *rest)
    assert all(map(torch.equal, RejectionAcceptance(block=True)(draft, *rest), expected))


@pytest.mark.parametrize("parents", [TREE, CHAIN], ids=["tree", "chain"])
def test_draft_vocabulary(parents):
    """The map goes with draft logits; a step without them (right after the prompt) does not mind it."""
    offsets = torch.tensor([0, 3, 3])
    draft = make_draft(parents, vocab=3)
    rest = judging(draft)
    wide = torch.full((B, len(parents), V), -torch.inf)
    wide[..., [0, 4, 5]] = draft.logits
    rule = RejectionAcceptance(draft_vocab_map=offsets, block=True)
    expected = RejectionAcceptance(block=True)(draft._replace(logits=wide), *rest)
    assert all(map(torch.equal, rule(draft, *rest), expected))
    rule(draft._replace(logits=None), *rest)


def test_typical():
    draft = make_draft(TREE, num_nodes=NUM_NODES)
    logits, temperature, uniforms = judging(draft)
    full = verify_tree_typical(
        draft.ids, draft.parents, logits, temperature, uniforms, NUM_NODES, epsilon=0.2, delta=0.4
    )
    rule = TypicalAcceptance(epsilon=0.2, delta=0.4)
    assert_trimmed(rule(draft, logits, temperature, uniforms), full, draft)


def test_logprobs_are_those_of_p():
    """Of the row each token was chosen from; of p where the token was recovered from the residual."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.7, 0.1], [0.25, 0.25, 0.25, 0.25]])
    q = torch.tensor([[0.2, 0.6, 0.1, 0.1]])
    # Row 0 rejects token 1 and recovers token 2 from [.75, 0, .25, 0]; row 1 accepts node 2 and draws a bonus token.
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    ids = torch.tensor([[9, 1, -1], [9, -1, 1]])
    u = torch.tensor([[0.9, 0.9, 0.9], [0.9, 0.9, 0.4]])
    logits, laws = p.log().expand(2, 3, 4), q.log().expand(2, 3, 4)
    result = verify_tree(ids, parents, logits, laws, torch.ones(2), u)
    assert result.output_ids.tolist() == [[2, -1, -1], [1, 3, -1]]
    expected = torch.tensor([[0.2, torch.nan, torch.nan], [0.3, 0.25, torch.nan]]).log()
    torch.testing.assert_close(emitted_logprobs(result, logits, torch.ones(2)), expected, equal_nan=True)


def test_logprobs_under_the_temperature():
    logits = torch.randn(2, 1, 5).bfloat16()
    result = Verification(torch.tensor([[3], [3]]), torch.zeros(2).int(), torch.zeros(2, 0).int())
    found = emitted_logprobs(result, logits, torch.tensor([0.5, 0.0]))
    expected = [logits[0, 0].float().mul(2).log_softmax(0)[3], logits[1, 0].float().log_softmax(0)[3]]
    torch.testing.assert_close(found[:, 0], torch.stack(expected))
    assert found.dtype == torch.float32
