"""Drafts in lists are those in tensors."""

import types

import pytest
import torch

from specdec_kernels.decoding import DynamicTree
from specdec_kernels.decoding.drafters import MedusaDrafter, MergedDrafter, NGramDrafter
from specdec_kernels.decoding.host import on_host, vector_of
from specdec_kernels.decoding.host_trees import HostTree, draft_of, trees_of
from specdec_kernels.decoding.walk import along_path, at_last_node
from specdec_kernels.testing import random_parents
from specdec_kernels.tree import depths_from_mask, mask_from_parents
from specdec_kernels.types import Verification

from .test_medusa_drafter import HIDDEN, TREE, VOCAB, output_of, random_heads

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", [(1,), (5,), (64, 3), (65, 64, 1)], ids=str)
def test_a_draft_describes_the_trees_it_is_made_of(sizes):
    trees = [HostTree(list(range(size)), random_parents(size, seed=size)) for size in sizes]
    draft = draft_of(trees, CPU)
    assert draft.parents.shape == draft.depths.shape == draft.ids.shape == (len(sizes), max(sizes))
    assert (draft.ids.dtype, draft.parents.dtype, draft.depths.dtype) == (torch.int64, torch.int32, torch.int32)
    assert torch.equal(draft.tree_mask, mask_from_parents(draft.parents))
    assert torch.equal(draft.depths, depths_from_mask(draft.tree_mask))
    assert draft.max_depth == int(draft.depths.max())
    assert all(part.is_contiguous() for part in draft[:4])
    used = None if len(set(sizes)) == 1 else list(sizes)
    assert (None if draft.num_nodes is None else draft.num_nodes.tolist()) == used
    assert trees_of(draft) == trees


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 99])
@pytest.mark.parametrize("tree", [TREE, DynamicTree(7, 5), DynamicTree(7, 5, 0.1)], ids=["fixed", "dynamic", "likely"])
@pytest.mark.parametrize("lookup_first", [False, True])
def test_merging_in_lists_and_in_tensors(tree, limit, lookup_first, monkeypatch):
    """Two rows, of which one finds a loop in its text and the other nothing."""
    medusa = MedusaDrafter(random_heads(), tree, torch.randn(VOCAB, HIDDEN))
    lookup, hidden = NGramDrafter(max_drafts=4), output_of(torch.randn(2, 1, HIDDEN))
    drafter = MergedDrafter(*((lookup, medusa) if lookup_first else (medusa, lookup)), max_nodes=9)
    drafter.bind(types.SimpleNamespace(max_nodes=limit, emitted=[[4], [3]], finished=[False, False]))
    drafter.begin(torch.tensor([[4, 5, 6], [1, 2, 0]]), torch.tensor([3, 2]), hidden)
    pending = torch.tensor([4, 3])
    assert drafter.drafts_on_host(pending)
    in_lists = trees_of(drafter.propose(pending))
    assert in_lists == drafter.trees(pending)
    for name in ("drafters.medusa.HOST_PATHS", "drafters.merged.HOST_NODES", "dynamic_tree.HOST_PATHS"):
        monkeypatch.setattr(f"specdec_kernels.decoding.{name}", 0)
    assert not drafter.drafts_on_host(pending)
    assert trees_of(drafter.propose(pending)) == in_lists
    assert max(len(tree.ids) for tree in in_lists) <= limit


def test_what_belongs_to_the_last_accepted_node(monkeypatch):
    accepted = torch.tensor([[2, 5, -1], [-1, -1, -1], [1, 2, 3]], dtype=torch.int32)
    count = torch.tensor([2, 0, 3], dtype=torch.int32)
    verification, values = Verification(torch.zeros(3, 4, dtype=torch.int64), count, accepted), torch.randn(3, 6, 7)
    expected = torch.stack([along_path(values, verification)[row, n] for row, n in enumerate(count.tolist())])
    assert torch.equal(at_last_node(values, verification), expected)
    monkeypatch.setattr("specdec_kernels.decoding.walk.values_readable", lambda *_: False)
    assert torch.equal(at_last_node(values, verification), expected)


def test_vectors_of_numbers():
    assert torch.equal(vector_of([-(2**63), 7], "q", CPU), torch.tensor([-(2**63), 7]))
    assert torch.equal(vector_of((True, False), "b", CPU), torch.tensor([1, 0], dtype=torch.int8))
    assert vector_of([], "i", CPU).shape == (0,)
    assert on_host(torch.tensor([1]), torch.tensor([[2, 3]])) == [[1], [[2, 3]]]
