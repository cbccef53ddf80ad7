"""Sizes are data: a compiled step meets new batches, trees, vocabularies and capacities without compiling again."""

from collections.abc import Callable

import pytest
import torch

from specdec_kernels import kv_compact_, medusa_project_topk, paged_tree_attention, tree_attention, verify_tree
from specdec_kernels.tree import mask_from_parents


def compact(batch: int, nodes: int, size: int):
    cache = torch.randn(batch, size, 2, 4)
    accepted = torch.arange(2, nodes, dtype=torch.int32).repeat(batch, 1)
    return kv_compact_, ([cache], accepted, lengths(batch, nodes - 2), lengths(batch, 3))


def attend(batch: int, nodes: int, size: int):
    cache = torch.randn(2, batch, size, 2, 8)
    return tree_attention, (torch.randn(batch, nodes, 4, 8), *cache, chain_mask(batch, nodes), lengths(batch, 3))


def attend_pages(batch: int, nodes: int, size: int):
    pool = torch.randn(2, batch * size, 2, 2, 8)
    table = torch.arange(batch * size, dtype=torch.int32).view(batch, size)
    q = torch.randn(batch, nodes, 4, 8)
    return paged_tree_attention, (q, *pool, table, chain_mask(batch, nodes), lengths(batch, 3))


def project(batch: int, nodes: int, size: int):
    return medusa_project_topk, (torch.randn(batch, 8), torch.randn(3, 1, 8, 8), None, torch.randn(size, 8), 4)


def verify(batch: int, nodes: int, size: int):
    logits = torch.randn(batch, nodes, size)
    ids, parents = torch.randint(size, (batch, nodes)), torch.arange(-1, nodes - 1, dtype=torch.int32)[None]
    return verify_tree, (ids, parents, logits, logits.roll(1), torch.ones(batch), torch.rand(batch, nodes))


def lengths(batch: int, length: int) -> torch.Tensor:
    return torch.full((batch,), length, dtype=torch.int32)


def chain_mask(batch: int, nodes: int) -> torch.Tensor:
    return mask_from_parents(torch.arange(-1, nodes - 1, dtype=torch.int32).repeat(batch, 1))


@pytest.mark.parametrize("make", [compact, attend, attend_pages, project, verify])
def test_new_sizes_do_not_compile_again(make: Callable) -> None:
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    op = make(2, 5, 16)[0]
    compiled = torch.compile(op, fullgraph=True, backend=count)
    for sizes in ((2, 5, 16), (3, 6, 17), (4, 9, 23), (7, 11, 31)):
        _, arguments = make(*sizes)
        copies = [[t.clone() for t in a] if isinstance(a, list) else a for a in arguments]
        actual, expected = compiled(*arguments), op(*copies)
        torch.testing.assert_close(actual or arguments[0], expected or copies[0], rtol=0, atol=0)
    # One for the first sizes, one for all others.
    assert len(graphs) == 2
