"""Trees grown at each step: the likeliest nodes, connected, without waiting for a device."""

import pytest
import torch

from specdec_kernels.decoding.dynamic_tree import DynamicTree, grow_best_first, num_grown
from specdec_kernels.tree import DraftTree, mask_from_parents

# Batch, depths, candidates, budget: smaller and larger than a level, than all there is, and than a mask word.
SIZES = [(3, 4, 10, 16), (2, 1, 4, 9), (2, 3, 2, 64), (1, 4, 3, 1), (2, 5, 6, 2), (0, 2, 3, 5), (2, 3, 8, 100)]


def every_path(rows: list[list[float]]) -> list[tuple[float, tuple[int, ...]]]:
    """List all paths of one row by what they promise, then by depth, by their beginning's place, and by rank."""
    level, found = [(torch.tensor(0.0), ())], []
    for row in rows:
        longer = [(total + torch.tensor(p), (*path, rank)) for total, path in level for rank, p in enumerate(row)]
        level = sorted(longer, key=lambda entry: -entry[0])  # stable: equal ones stay by beginning and rank
        found += level
    return sorted(found, key=lambda entry: -entry[0])


def paths_of(parents: list[int], columns: list[int], top_k: int) -> list[tuple[int, ...]]:
    paths = [()]
    for parent, column in zip(parents[1:], columns, strict=True):
        assert column // top_k == len(paths[parent])
        paths.append((*paths[parent], column % top_k))
    return paths[1:]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_likeliest_paths_of_all(size, ties):
    batch, num_depths, top_k, num_nodes = size
    log_probs = torch.randn(batch, num_depths, top_k).log_softmax(-1)
    log_probs = (2 * log_probs).round() / 2 if ties else log_probs  # sums of halves are exact
    trees = grow_best_first(log_probs, num_nodes)
    count = num_grown(num_nodes, num_depths, top_k)
    assert trees.parents.shape == trees.depths.shape == (batch, count)
    assert trees.columns.shape == (batch, count - 1)
    for row in range(batch):
        parents = trees.parents[row].tolist()
        tree = DraftTree.from_parents(parents)  # connected, in topological order
        assert tree.depths == tuple(trees.depths[row].tolist())
        expected = every_path(log_probs[row].tolist())[: count - 1]
        assert paths_of(parents, trees.columns[row].tolist(), top_k) == [path for _, path in expected]


def test_rows_get_trees_of_their_own():
    sure, unsure = torch.tensor([-0.01, -5.0, -6.0, -7.0]), torch.tensor([-1.4, -1.5, -1.6, -1.7])
    trees = grow_best_first(torch.stack([sure.expand(4, -1), unsure.expand(4, -1)]), 5)
    assert trees.parents.tolist() == [[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]]
    assert trees.parents.dtype == trees.depths.dtype == torch.int32


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, torch.inf])
def test_bad_numbers_still_give_trees(bad):
    log_probs = torch.randn(4, 3, 6).log_softmax(-1)
    log_probs[0], log_probs[1, 0], log_probs[2, 1:], log_probs[3, :, 2:] = bad, bad, bad, bad
    trees = grow_best_first(log_probs, 24)
    for parents, columns in zip(trees.parents.tolist(), trees.columns.tolist(), strict=True):
        DraftTree.from_parents(parents)
        assert len(set(paths_of(parents, columns, 6))) == 23


@pytest.mark.parametrize("min_prob", [0.0, 1e-30, 0.05])
@pytest.mark.parametrize("bad", [0.0, torch.nan, -torch.inf, torch.inf, -3e38])
def test_the_heap_and_the_levels_grow_the_same(bad, min_prob, monkeypatch):
    """Few paths are grown on the host: the same trees, whatever the numbers and wherever fp32 rounds two sums alike."""
    log_probs = torch.randn(4, 4, 7).log_softmax(-1) + torch.tensor([0.0, -1e5, -1e7, -1e9])[:, None, None]
    log_probs[torch.rand(4, 4, 7) < 0.2] = bad
    trees = grow_best_first(log_probs, 15, min_prob)
    monkeypatch.setattr("specdec_kernels.decoding.dynamic_tree.HOST_PATHS", 0)
    expected = grow_best_first(log_probs, 15, min_prob)
    assert (trees.used is None) == (expected.used is None) == (min_prob == 0)
    for tree, other in zip(trees[: 4 if min_prob else 3], expected, strict=min_prob > 0):
        assert torch.equal(tree, other)
        assert tree.dtype == other.dtype


@pytest.mark.parametrize("host_paths", [0, 512])
@pytest.mark.parametrize("min_prob", [0.01, 0.2, 0.999])
def test_nodes_below_the_probability_are_not_used(min_prob, host_paths, monkeypatch):
    monkeypatch.setattr("specdec_kernels.decoding.dynamic_tree.HOST_PATHS", host_paths)
    log_probs = torch.randn(5, 3, 4).mul(3).log_softmax(-1)
    log_probs[0], log_probs[1, 0, 0] = torch.nan, 0.0
    trees = grow_best_first(log_probs, 12, min_prob)
    assert trees.parents.shape == (5, 12)
    for row, used in enumerate(trees.used.tolist()):
        expected = [path for prob, path in every_path(log_probs[row].tolist()) if prob.exp() >= min_prob][:11]
        assert used == 1 + len(expected)
        paths = paths_of(trees.parents[row].tolist(), trees.columns[row].tolist(), 4)
        assert paths[: used - 1] == expected
    assert trees.used[0] == 1
    assert trees.used[1] > 1


def test_one_graph_and_no_data_dependence():
    """On the meta device there is nothing to wait for; a tree that asked for a value would raise."""

    def grow(log_probs):
        trees = grow_best_first(log_probs, 20, 0.01)
        return *trees, mask_from_parents(trees.parents)

    log_probs = torch.randn(3, 4, 8).log_softmax(-1)
    compiled = torch.compile(grow, backend="aot_eager", fullgraph=True)(log_probs)
    assert all(torch.equal(a, b) for a, b in zip(compiled, grow(log_probs), strict=True))
    on_meta = grow(log_probs.to("meta"))
    assert [t.shape for t in on_meta] == [t.shape for t in compiled]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grow_best_first(torch.zeros(2, 3), 4), r"log_probs must have shape \(B, M, K\)"),
        (
            lambda: grow_best_first(torch.zeros(2, 3, 4, dtype=torch.float64), 4),
            "log_probs must be float32, got float64",
        ),
        (lambda: grow_best_first(torch.zeros(2, 3, 4), 0), r"num_nodes must be in \[1, 1024\], got 0"),
        (lambda: DynamicTree(0), r"num_nodes must be in \[1, 1024\], got 0"),
        (lambda: DynamicTree(4, 65), r"top_k must be in \[1, 64\], got 65"),
        (lambda: DynamicTree(4, min_prob=1.0), r"DynamicTree: min_prob must be in \[0, 1\), got 1.0"),
        (lambda: grow_best_first(torch.zeros(2, 3, 4), 4, -0.1), r"min_prob must be in \[0, 1\), got -0.1"),
        (lambda: grow_best_first(torch.zeros(2, 3, 4), 4, torch.nan), r"min_prob must be in \[0, 1\), got nan"),
    ],
)
def test_rejects(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
