"""Packed masks: word edges, the sign bit, rows with trees of their own, and no read of a device's data."""

import pytest
import torch

from specdec_kernels import DraftTree
from specdec_kernels.testing import random_parents
from specdec_kernels.tree import depths_from_mask, mask_behind, mask_from_parents, pack_mask, unpack_mask

# Word edges: bits 30…32 and 62…64 differ in how they shift; 1024 is the largest supported block.
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1024]
SHAPES = ["chain", "star", "random"]


def tree_of(shape: str, num_nodes: int, seed: int = 0) -> DraftTree:
    if shape == "chain":
        return DraftTree.chain(num_nodes - 1)
    parents = random_parents(num_nodes, seed) if shape == "random" else [-1, *[0] * (num_nodes - 1)]
    return DraftTree.from_parents(parents)


def bits_of(row: torch.Tensor) -> set[int]:
    whole = sum((int(word) % 2**64) << 64 * i for i, word in enumerate(row))
    return {i for i in range(64 * len(row)) if whole >> i & 1}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_nodes", SIZES)
def test_all_ways_to_the_packed_mask_agree(num_nodes, shape):
    tree = tree_of(shape, num_nodes)
    packed = mask_from_parents(tree.to_parents_tensor())
    assert packed.shape == (num_nodes, -(-num_nodes // 64))
    assert packed.dtype == torch.int64
    assert torch.equal(packed, tree.to_packed_mask())
    assert torch.equal(packed, pack_mask(tree.to_dense_mask()))
    assert torch.equal(unpack_mask(packed, num_nodes), tree.to_dense_mask())
    assert torch.equal(depths_from_mask(packed), tree.to_depths_tensor())
    last = num_nodes - 1
    assert bits_of(packed[last]) == set(tree.path(last))


def test_bit_63_is_the_sign():
    packed = mask_from_parents(DraftTree.chain(64).to_parents_tensor())
    assert packed[62].tolist() == [2**63 - 1, 0]
    assert packed[63].tolist() == [-1, 0]
    assert packed[64].tolist() == [-1, 1]
    star = mask_from_parents(tree_of("star", 65).to_parents_tensor())
    assert star[63].tolist() == [-(2**63) + 1, 0]
    assert depths_from_mask(star)[63] == 1


def test_window_by_depth_needs_the_depths_of_the_mask():
    """Prefix 4, window 3: node 5 sits at position 6 and sees positions 4, 5, 6: nodes 0, 2, 5."""
    packed = DraftTree.from_parents([-1, 0, 0, 1, 1, 2]).to_packed_mask()
    depths = depths_from_mask(packed)
    assert depths.dtype == torch.int32
    assert depths.tolist() == [0, 1, 1, 2, 2, 2]
    near = depths[5] - depths < 3
    assert (unpack_mask(packed, 6)[5] & near).nonzero().flatten().tolist() == [0, 2, 5]


@pytest.mark.parametrize("num_nodes", [1, 33, 64, 65, 200])
def test_each_row_of_a_batch_is_a_tree_of_its_own(num_nodes):
    trees = [tree_of(shape, num_nodes, seed) for seed, shape in enumerate([*SHAPES, "random"])]
    parents = torch.stack([tree.to_parents_tensor() for tree in trees])
    expected = torch.stack([tree.to_packed_mask() for tree in trees])
    assert torch.equal(mask_from_parents(parents), expected)
    strided = torch.full((4, 2 * num_nodes), 7, dtype=torch.int64)[:, ::2].copy_(parents)
    assert torch.equal(mask_from_parents(strided), expected)
    assert torch.equal(mask_from_parents(parents.t().contiguous().t()), expected)
    assert mask_from_parents(parents[:0]).shape == (0, *expected.shape[1:])


@pytest.mark.parametrize("num_nodes", [1, 6, 63])
def test_nodes_behind_a_chain_have_a_mask_of_their_own(num_nodes):
    found = 0
    for seed, shape in enumerate([*SHAPES, "random"]):
        packed = tree_of(shape, num_nodes, seed).to_packed_mask()
        dense = unpack_mask(packed, num_nodes)
        for first in range(num_nodes):
            behind = mask_behind(packed, first)
            if dense[first:, :first].all():
                found += 1
                assert torch.equal(behind, pack_mask(dense[first:, first:]))
            else:
                assert behind is None
    assert found > num_nodes
    two = torch.stack([DraftTree.chain(2).to_packed_mask(), mask_from_parents(torch.tensor([-1, 0, 0]))])
    assert mask_behind(two, 1).tolist() == [[[1], [3]], [[1], [2]]]
    assert mask_behind(two, 2) is None, "one row of the batch forks"


def test_what_lies_behind_a_chain_is_not_always_known():
    assert mask_behind(DraftTree.chain(63).to_packed_mask(), 1) is None, "bit 63 is the sign"
    assert mask_behind(torch.empty(2, 6, 1, dtype=torch.int64, device="meta"), 1) is None


def test_padding_nodes_see_themselves_only():
    packed = mask_from_parents(torch.tensor([[-1, 0, 1, -1, -1], [-1, 0, 0, 0, 0]], dtype=torch.int32))
    assert packed.squeeze(-1).tolist() == [[1, 3, 7, 8, 16], [1, 3, 5, 9, 17]]


def test_leading_dimensions_and_strides_of_pack_and_unpack():
    dense = torch.stack([tree_of("random", 65, seed).to_dense_mask() for seed in range(6)]).reshape(2, 3, 65, 65)
    packed = pack_mask(dense)
    assert packed.shape == (2, 3, 65, 2)
    assert torch.equal(unpack_mask(packed, 65), dense)
    assert torch.equal(pack_mask(dense.permute(1, 0, 3, 2)), pack_mask(dense.permute(1, 0, 3, 2).contiguous()))
    assert torch.equal(depths_from_mask(packed.transpose(0, 1)), dense.sum(-1).transpose(0, 1) - 1)
    assert pack_mask(dense[:, :0]).shape == (2, 0, 65, 2)


def test_popcount_of_arbitrary_words():
    words = torch.randint(-(2**63), 2**63 - 1, (500, 3))
    words[0] = torch.tensor([-1, -(2**63), 2**63 - 1])
    words[1] = torch.tensor([0, 1, -2])
    expected = [sum(bin(int(word) % 2**64).count("1") for word in row) - 1 for row in words]
    assert depths_from_mask(words).tolist() == expected


def test_bits_past_the_last_node_are_ignored_by_unpack():
    assert torch.equal(unpack_mask(torch.tensor([[-1], [-1]]), 2), torch.ones(2, 2).bool())


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: pack_mask([[True]]), TypeError, "dense must be a torch.Tensor, got list"),
        (lambda: pack_mask(torch.ones(2, 2)), TypeError, "dense must be bool, got float32"),
        (lambda: pack_mask(torch.ones(2, 3).bool()), ValueError, r"\(\.\.\., T, T\) with T >= 1, got \(2, 3\)"),
        (lambda: pack_mask(torch.ones(2).bool()), ValueError, r"got \(2,\)"),
        (lambda: pack_mask(torch.ones(0, 0).bool()), ValueError, r"T >= 1, got \(0, 0\)"),
        (lambda: unpack_mask(torch.ones(2, 1), 2), TypeError, "packed must be int64, got float32"),
        (lambda: unpack_mask(torch.ones(65, 1).long(), 65), ValueError, r"\(\.\.\., 65, 2\).*got \(65, 1\)"),
        (lambda: unpack_mask(torch.ones(3, 1).long(), 2), ValueError, r"num_nodes=2 >= 1, got \(3, 1\)"),
        (lambda: unpack_mask(torch.ones(0, 0).long(), 0), ValueError, "num_nodes=0 >= 1"),
        (lambda: depths_from_mask(torch.ones(2, 1)), TypeError, "packed must be int64, got float32"),
        (lambda: depths_from_mask(torch.ones(2).long()), ValueError, r"\(\.\.\., T, W\), got \(2,\)"),
        (lambda: mask_from_parents([-1]), TypeError, "parents must be a torch.Tensor, got list"),
        (lambda: mask_from_parents(torch.ones(2)), TypeError, "parents must be int32 or int64, got float32"),
        (lambda: mask_from_parents(ints([[[-1]]])), ValueError, r"\(B, T\) or \(T,\), T >= 1, got \(1, 1, 1\)"),
        (lambda: mask_from_parents(ints([])), ValueError, r"T >= 1, got \(0,\)"),
        (lambda: mask_from_parents(ints([0, 0])), ValueError, r"parents\[..., 0\] must be in \[-1, -1\], got 0"),
        (lambda: mask_from_parents(ints([-1, 0, 2])), ValueError, r"parents\[2\] must be in \[-1, 1\], got 2"),
        (lambda: mask_from_parents(ints([[-1, 0], [-1, -2]])), ValueError, r"parents\[1, 1\] must be in .*, got -2"),
    ],
)
def test_rejects(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_nothing_reads_the_data():
    """A meta tensor has no data: a read, or a shape that depends on it, would raise."""
    parents = torch.empty(3, 65, dtype=torch.int32, device="meta")
    packed = mask_from_parents(parents)
    assert (packed.shape, packed.device.type) == ((3, 65, 2), "meta")
    assert depths_from_mask(packed).shape == (3, 65)
    assert pack_mask(unpack_mask(packed, 65)).shape == (3, 65, 2)


def roundtrip(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = mask_from_parents(parents)
    return packed, pack_mask(unpack_mask(packed, parents.shape[-1])), depths_from_mask(packed)


def test_compiles_without_a_graph_break():
    compiled = torch.compile(roundtrip, fullgraph=True, backend="aot_eager", dynamic=False)
    for num_nodes in (1, 65):
        tree = tree_of("random", num_nodes)
        packed, again, depths = compiled(tree.to_parents_tensor().expand(2, -1))
        assert torch.equal(packed, tree.to_packed_mask().expand(2, -1, -1))
        assert torch.equal(again, packed)
        assert torch.equal(depths, tree.to_depths_tensor().expand(2, -1))


def test_unchecked_values_do_no_harm():
    """Where values are not read, an entry past the tree counts as no parent, and a cycle ends."""
    compiled = torch.compile(mask_from_parents, fullgraph=True, backend="aot_eager")
    assert compiled(ints([-1, 0, 9, 2])).flatten().tolist() == [1, 3, 4, 12]
    assert compiled(ints([-1, 2, 1, 0])).shape == (4, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph():
    trees = [tree_of(shape, 65, seed) for seed, shape in enumerate(SHAPES)]
    parents = torch.stack([tree.to_parents_tensor() for tree in trees]).cuda()
    roundtrip(parents)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed, again, depths = roundtrip(parents)
    parents.copy_(parents.flip(0).clone())
    graph.replay()
    expected = torch.stack([tree.to_packed_mask() for tree in reversed(trees)])
    assert torch.equal(packed.cpu(), expected)
    assert torch.equal(again, packed)
    assert torch.equal(depths.cpu(), torch.stack([tree.to_depths_tensor() for tree in reversed(trees)]))


@pytest.mark.parametrize("num_nodes", [1, 2, 63, 64])
def test_few_nodes_give_the_same_as_many(num_nodes, monkeypatch):
    """The loop over Python numbers against the tensor operations, padding included."""
    parents = torch.tensor([random_parents(num_nodes, seed) for seed in range(3)], dtype=torch.int32)
    parents[1, num_nodes // 2 :] = -1
    few = mask_from_parents(parents), mask_from_parents(parents[0])
    depths = [depths_from_mask(mask) for mask in few]
    monkeypatch.setattr("specdec_kernels.tree.mask.HOST_NODES", 0)
    assert torch.equal(few[0], mask_from_parents(parents))
    assert torch.equal(few[1], mask_from_parents(parents[0]))
    for mask, depth in zip(few, depths, strict=True):
        many = depths_from_mask(mask)
        assert torch.equal(depth, many)
        assert depth.dtype == many.dtype
