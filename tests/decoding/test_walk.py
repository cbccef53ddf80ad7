"""The walk decides as the whole tree would, bit for bit, and processes little."""

import pytest
import torch

from specdec_kernels.decoding import GreedyAcceptance, RejectionAcceptance, TypicalAcceptance
from specdec_kernels.decoding.walk import along_path, verify_processed
from specdec_kernels.testing import random_parents
from specdec_kernels.tree import DraftTree

from .toy import draft_of

BATCH, VOCAB = 7, 6
EVERY_ROW = torch.ones(BATCH, dtype=torch.bool)
RULES = {
    "greedy": GreedyAcceptance(),
    "rejection": RejectionAcceptance(),
    "with replacement": RejectionAcceptance(with_replacement=True),
    "block": RejectionAcceptance(block=True),
    "typical": TypicalAcceptance(),
}


def case(tree, *, seed, sampled):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (BATCH, tree.num_nodes), generator=generator)
    logits = torch.randn(BATCH, tree.num_nodes, VOCAB, generator=generator)
    drafted = torch.randn(BATCH, tree.num_nodes, VOCAB, generator=generator) if sampled else None
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 1.0, 0.0])
    uniforms = torch.rand(BATCH, tree.num_nodes, generator=generator)
    return draft_of(tree, ids, drafted), logits, temperature, uniforms


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("num_nodes", [1, 2, 5, 23])
def test_equals_the_verification_of_processed_logits(rule, sampled, num_nodes):
    for seed in range(8):
        chain = rule == "block" or seed == 0
        tree = DraftTree.chain(num_nodes - 1) if chain else DraftTree.from_parents(random_parents(num_nodes, seed))
        draft, logits, temperature, uniforms = case(tree, seed=seed, sampled=sampled)
        if seed % 2:
            draft = draft._replace(num_nodes=torch.randint(1, num_nodes + 1, (BATCH,), dtype=torch.int32))
        processed = 3 * logits
        if seed > 3:  # NaN where a walk ends, which is below the root for some
            path = RULES[rule](draft, processed, temperature, uniforms)
            last = along_path(torch.arange(num_nodes).expand(BATCH, -1), path).gather(
                1, path.num_accepted[:, None].long()
            )
            processed[torch.arange(4), last[:4, 0]] = torch.nan
        expected = RULES[rule](draft, processed, temperature, uniforms)

        def process(rows, nodes, logits=logits, processed=processed):
            index = torch.arange(BATCH)
            assert torch.equal(rows[nodes >= 0], logits[index, nodes][nodes >= 0])
            return torch.where(nodes[:, None] >= 0, processed[index, nodes], 0.0)

        actual, path_logits = verify_processed(RULES[rule], draft, logits, temperature, uniforms, process, EVERY_ROW)
        for got, wanted in zip(actual, expected, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)
        named = along_path(processed, expected)
        for row, count in enumerate(expected.num_accepted.tolist()):
            if expected.output_ids[row, 0] >= 0:
                assert torch.equal(path_logits[row, : count + 1], named[row, : count + 1])


def test_only_nodes_on_the_walk_are_processed():
    tree = DraftTree.from_parents(random_parents(23, 5))
    draft, logits, temperature, uniforms = case(tree, seed=1, sampled=False)
    met = []

    def process(rows, nodes):
        met.append(nodes)
        return rows

    verification, _ = verify_processed(RejectionAcceptance(), draft, logits, temperature, uniforms, process, EVERY_ROW)
    count = int(verification.num_accepted.max())
    assert count >= 1
    assert torch.equal(
        torch.stack(met, 1), torch.cat([torch.zeros(BATCH, 1), verification.accepted[:, :count]], 1).long()
    )


@pytest.mark.parametrize("rule", RULES)
def test_rows_that_have_ended_cost_nothing(rule):
    tree = DraftTree.chain(4)
    draft, logits, temperature, uniforms = case(tree, seed=2, sampled=False)
    active = torch.arange(BATCH) % 2 == 0
    expected = RULES[rule](draft, logits, temperature, uniforms)

    def process(rows, nodes):
        assert (nodes[~active] == -1).all()
        return rows

    actual, _ = verify_processed(RULES[rule], draft, logits, temperature, uniforms, process, active)
    for got, wanted in zip(actual, expected, strict=True):
        assert torch.equal(got[active], wanted[active])
