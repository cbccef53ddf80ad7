"""`DraftTree`: every format there and back, every documented error, files."""

import dataclasses
import json
import pickle

import pytest
import torch

from specdec_kernels import DraftTree
from specdec_kernels.testing import random_parents
from specdec_kernels.tree import load_metadata

T1 = (-1, 0, 0, 1, 1, 2)
# One node, a chain, a bush, primes, the edges of a mask word, and the largest supported block.
SIZES = [1, 2, 7, 31, 32, 33, 63, 64, 65, 128, 1024]


def random_tree(num_nodes: int, seed: int = 0) -> DraftTree:
    """Draw a tree whose sibling ranks have gaps and do not follow the node order."""
    parents = random_parents(num_nodes, seed + num_nodes)
    generator = torch.Generator().manual_seed(seed)
    free = {node: torch.randperm(num_nodes + 3, generator=generator).tolist() for node in set(parents)}
    return DraftTree.from_parents(parents, [0, *(free[parent].pop() for parent in parents[1:])])


def walk(parents, node) -> list[int]:
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def test_the_documented_example():
    tree = DraftTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])
    assert tree.parents == T1
    assert tree.ranks == (0, 0, 1, 0, 1, 0)
    assert tree.depths == (0, 1, 1, 2, 2, 2)
    assert tree.children == ((1, 2), (3, 4), (5,), (), (), ())
    assert (tree.num_nodes, tree.max_depth, tree.leaves) == (6, 2, (3, 4, 5))
    assert tree.path(4) == (0, 1, 4)
    for node in (-1, 6):
        with pytest.raises(ValueError, match=rf"node must be in \[0, 5\], got {node}"):
            tree.path(node)
    assert tree.to_retrieve_indices().tolist() == [[0, 1, 3], [0, 1, 4], [0, 2, 5]]
    visible = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}]
    assert [set(row.nonzero().flatten().tolist()) for row in tree.to_dense_mask()] == visible


@pytest.mark.parametrize("num_nodes", SIZES)
def test_formats_agree_with_walking_the_parents(num_nodes):
    tree = random_tree(num_nodes)
    paths = [walk(tree.parents, node) for node in range(num_nodes)]
    assert tree.depths == tuple(len(path) - 1 for path in paths)
    assert tree.max_depth == max(tree.depths)
    assert [tuple(path) for path in paths] == [tree.path(node) for node in range(num_nodes)]
    assert tree.to_choices() == [[tree.ranks[node] for node in path[1:]] for path in paths[1:]]
    leaves = [node for node in range(num_nodes) if node not in tree.parents]
    rows = [[node for node in row if node >= 0] for row in tree.to_retrieve_indices().tolist()]
    assert rows == [paths[leaf] for leaf in leaves]
    dense = tree.to_dense_mask().tolist()
    assert [[j for j, visible in enumerate(row) if visible] for row in dense] == paths
    words = tree.to_packed_mask().tolist()
    for row, path in zip(words, paths, strict=True):
        assert sum((word % 2**64) << 64 * i for i, word in enumerate(row)) == sum(1 << node for node in path)


@pytest.mark.parametrize("num_nodes", SIZES)
def test_every_format_leads_back(num_nodes):
    tree = random_tree(num_nodes)
    assert DraftTree(tree.parents, tree.ranks) == tree
    assert DraftTree.from_parents(tree.to_parents_tensor(), torch.tensor(tree.ranks)) == tree
    assert DraftTree.from_retrieve_indices(tree.to_retrieve_indices(), tree.ranks) == tree
    assert DraftTree.from_retrieve_indices(tree.to_retrieve_indices().flip(0).tolist(), tree.ranks) == tree
    assert DraftTree.from_dense_mask(tree.to_dense_mask(), tree.ranks) == tree
    sorted_tree = DraftTree.from_choices(tree.to_choices())
    assert sorted_tree.to_choices() == sorted(tree.to_choices(), key=lambda path: (len(path), path))
    assert DraftTree.from_choices(sorted_tree.to_choices()[::-1]) == sorted_tree


def test_from_choices_numbers_nodes_as_medusa_does_in_any_order():
    listed = [[2], [0, 1], [0], [2, 0], [0, 0], [1], [0, 1, 0]]
    tree = DraftTree.from_choices(listed)
    assert tree.to_choices() == [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]]
    assert DraftTree.from_choices(tuple(map(tuple, reversed(listed)))) == tree


def test_siblings_without_ranks_are_numbered_in_node_order():
    assert DraftTree.from_parents([-1, 0, 1, 0, 1, 0]).ranks == (0, 0, 0, 1, 1, 2)
    table = [[0, 1, 3], [0, 2, -1], [-1, -1, -1]]
    assert DraftTree.from_retrieve_indices(table).ranks == (0, 0, 1, 0)


def test_depth_one_and_depth_zero_trees():
    root = DraftTree.from_parents([-1])
    assert root == DraftTree.chain(0) == DraftTree.from_choices([]) == DraftTree.from_retrieve_indices([[0]])
    assert root.to_retrieve_indices().tolist() == [[0]]
    assert (root.max_depth, root.leaves, root.to_packed_mask().tolist()) == (0, (0,), [[1]])
    star = DraftTree.from_parents([-1, 0, 0, 0])
    assert star == DraftTree.from_choices([[0], [1], [2]])
    assert star.to_packed_mask().flatten().tolist() == [1, 3, 5, 9]


def test_chain():
    assert DraftTree.chain(3).parents == (-1, 0, 1, 2)
    assert DraftTree.chain(3).ranks == (0, 0, 0, 0)
    assert DraftTree.chain(3).to_choices() == [[0], [0, 0], [0, 0, 0]]


def test_tensors_have_the_promised_types():
    tree = DraftTree.from_parents(T1)
    shapes = {
        "to_parents_tensor": ((6,), torch.int32),
        "to_depths_tensor": ((6,), torch.int32),
        "to_retrieve_indices": ((3, 3), torch.int64),
        "to_dense_mask": ((6, 6), torch.bool),
        "to_packed_mask": ((6, 1), torch.int64),
    }
    for name, (shape, dtype) in shapes.items():
        out = getattr(tree, name)()
        assert (tuple(out.shape), out.dtype, out.is_contiguous()) == (shape, dtype, True), name
        assert getattr(tree, name)(device="meta").device.type == "meta", name


def test_a_tree_is_a_value():
    tree = DraftTree.from_parents(T1)
    assert {tree: 1}[DraftTree.from_parents(list(T1))] == 1
    assert pickle.loads(pickle.dumps(tree)) == tree
    assert tree != DraftTree.from_parents(T1, [0, 1, 0, 0, 1, 0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.parents = (-1,)


def dense(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


REJECTED = {
    "no-nodes": (lambda: DraftTree.from_parents([]), "node 0 must be the root"),
    "root-missing": (lambda: DraftTree.from_parents([0, 0]), "node 0 must be the root"),
    "second-root": (lambda: DraftTree.from_parents([-1, 0, -1]), "node 2 has no parent"),
    "out-of-range": (lambda: DraftTree.from_parents([-1, 0, 3]), r"node 2 has parent 3, outside \[0, 2\]"),
    "below-minus-one": (lambda: DraftTree.from_parents([-1, -2]), "node 1 has parent -2, outside"),
    "cycle": (lambda: DraftTree.from_parents([-1, 2, 1]), "node 1 has parent 2, .*on a cycle"),
    "own-parent": (lambda: DraftTree.from_parents([-1, 0, 2]), "node 2 has parent 2, .*on a cycle"),
    "not-topological": (lambda: DraftTree.from_parents([-1, 2, 0]), "node 1 has parent 2, .*topological order"),
    "below-a-cycle": (lambda: DraftTree.from_parents([-1, 2, 3, 2]), "node 1 has parent 2, .*topological order"),
    "ranks-count": (lambda: DraftTree.from_parents([-1, 0], [0]), "one entry for each of 2 nodes, got 1"),
    "root-rank": (lambda: DraftTree.from_parents([-1, 0], [1, 0]), "root's rank must be 0, got 1"),
    "negative-rank": (lambda: DraftTree.from_parents([-1, 0], [0, -1]), "node 1 has rank -1"),
    "same-rank": (lambda: DraftTree.from_parents([-1, 0, 0], [0, 1, 1]), "nodes 1 and 2 are the same path"),
    "chain-negative": (lambda: DraftTree.chain(-1), "num_drafts must be >= 0, got -1"),
    "prefix-missing": (lambda: DraftTree.from_choices([[0], [0, 2, 1]]), r"path \[0, 2, 1\] needs its prefix \[0, 2\]"),
    "depth-skipped": (lambda: DraftTree.from_choices([[1, 0]]), r"path \[1, 0\] needs its prefix \[1\]"),
    "path-twice": (lambda: DraftTree.from_choices([[0], [1], [0]]), r"path \[0\] is listed twice"),
    "empty-path": (lambda: DraftTree.from_choices([[], [0]]), "must not list the root"),
    "choice-negative": (lambda: DraftTree.from_choices([[-1]]), "node 1 has rank -1"),
    "rank-at-top-k": (lambda: DraftTree.from_choices([[11]], top_k=10), r"path \[11\] has rank 11, but top_k is 10"),
    "deeper-than-heads": (
        lambda: DraftTree.from_choices([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], num_heads=3),
        r"path \[0, 0, 0, 0\] is 4 deep, but there are 3 heads",
    ),
    "table-empty": (lambda: DraftTree.from_retrieve_indices([]), "the table has no path"),
    "table-padding-only": (lambda: DraftTree.from_retrieve_indices([[-1, -1]]), "the table has no path"),
    "table-gap": (lambda: DraftTree.from_retrieve_indices([[0, -1, 1]]), "row 0 of the table has a -1 before a node"),
    "table-pad-minus-two": (lambda: DraftTree.from_retrieve_indices([[0, 1, -2]]), "row 0 .* has node -2; only -1"),
    "table-no-root": (lambda: DraftTree.from_retrieve_indices([[0, 1], [2, 1]]), "row 1 of the table must start at"),
    "table-two-parents": (
        lambda: DraftTree.from_retrieve_indices([[0, 1, 3], [0, 2, 3]]),
        r"node 3 has two parents, 1 and 2 \(row 1\)",
    ),
    "table-node-missing": (lambda: DraftTree.from_retrieve_indices([[0, 1], [0, 3]]), "node 2 is on no row"),
    "table-inner-end": (lambda: DraftTree.from_retrieve_indices([[0, 1], [0, -1]]), "row 1 .* ends at node 0, which"),
    "table-row-twice": (lambda: DraftTree.from_retrieve_indices([[0, 1], [0, 1]]), "rows 0 and 1 .* the same path"),
    "table-not-topological": (lambda: DraftTree.from_retrieve_indices([[0, 2, 1]]), "node 1 has parent 2"),
    "table-back-to-root": (lambda: DraftTree.from_retrieve_indices([[0, 1, 0]]), "node 0 has two parents, -1 and 1"),
    "mask-not-square": (lambda: DraftTree.from_dense_mask(torch.ones(2, 3).bool()), r"shape \(T, T\).*got \(2, 3\)"),
    "mask-empty": (lambda: DraftTree.from_dense_mask(torch.ones(0, 0).bool()), r"T >= 1, got \(0, 0\)"),
    "mask-not-reflexive": (lambda: DraftTree.from_dense_mask(dense("10", "10")), "node 1 does not see itself"),
    "mask-sees-later": (lambda: DraftTree.from_dense_mask(dense("11", "11")), "node 0 sees the later node 1"),
    "mask-no-root": (lambda: DraftTree.from_dense_mask(dense("10", "01")), "node 1 does not see the root"),
    "mask-not-transitive": (
        lambda: DraftTree.from_dense_mask(dense("1000", "1100", "1110", "1011")),
        "not transitive: node 3 sees 2, which sees 1, but node 3 does not see 1",
    ),
    "mask-two-branches": (
        lambda: DraftTree.from_dense_mask(dense("1000", "1100", "1010", "1111")),
        "node 3 sees two branches, nodes 1 and 2",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejects(case):
    make, message = REJECTED[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftTree.from_choices([0, 1]), r"choices\[0\] must be a sequence of integers, got 0"),
        (lambda: DraftTree.from_choices([["a"]]), r"choices\[0\] must be a sequence of integers"),
        (lambda: DraftTree.from_parents([-1, 0.5]), "parents must be a sequence of integers"),
        (lambda: DraftTree.from_parents(torch.tensor([[-1, 0]])), "parents must be a sequence of integers"),
        (lambda: DraftTree.from_dense_mask(torch.ones(2, 2)), "mask must be bool, got float32"),
    ],
    ids=["path-is-int", "path-of-text", "float-parent", "two-dimensional-parents", "float-mask"],
)
def test_rejects_kinds(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_rank_of_ten_or_more_stays_what_it_is():
    tree = DraftTree.from_choices([[11], [11, 15]], top_k=16, num_heads=2)
    assert tree.ranks == (0, 11, 15)
    tree.check_heads(num_heads=2, top_k=16)
    with pytest.raises(ValueError, match="rank 15, but top_k is 15"):
        tree.check_heads(top_k=15)


@pytest.mark.parametrize("num_nodes", [1, 6, 65])
def test_save_and_load(tmp_path, num_nodes):
    tree = random_tree(num_nodes)
    file = tmp_path / "tree.json"
    tree.save(file, expected_tokens_per_step=2.5, source="a test", path="kept too")
    assert DraftTree.load(file) == tree
    assert load_metadata(file) == {"expected_tokens_per_step": 2.5, "source": "a test", "path": "kept too"}
    assert json.loads(file.read_text())["choices"] == tree.to_choices()


def test_a_tree_in_medusa_order_is_saved_as_choices_alone(tmp_path):
    DraftTree.from_choices([[1], [0], [1, 0]]).save(tmp_path / "tree.json")
    assert json.loads((tmp_path / "tree.json").read_text()) == {"choices": [[0], [1], [1, 0]]}


@pytest.mark.parametrize(
    "content",
    [
        {"choices": [[1], [0, 0], [0]]},
        {"parents": [-1, 0, 0, 1]},
        {"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0]},
        {"retrieve_indices": [[0, 1, 3], [0, 2, -1]]},
    ],
    ids=["choices", "parents", "parents-ranks", "retrieve-indices"],
)
def test_load_takes_every_format(tmp_path, content):
    (tmp_path / "tree.json").write_text(json.dumps(content))
    assert DraftTree.load(tmp_path / "tree.json") == DraftTree((-1, 0, 0, 1), (0, 0, 1, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("[[0]]", "must hold a JSON object, got list"),
        ("{}", "needs choices, parents or retrieve_indices, got nothing"),
        ('{"nodes": 3}', "needs choices, parents or retrieve_indices, got nodes"),
        ('{"choices": [[0, 0]]}', "needs its prefix"),
        ('{"choices": 5}', "not iterable"),
        ('{"choices": [[0]], "parents": [-1, 0, 0]}', "one entry for each of 3 nodes, got 2"),
        ('{"choices": [[0], [1]], "parents": [-1, 0, 1]}', "choices and parents are different trees"),
        ('{"choices": [[]], "parents": [-1, 0]}', "must not list the root"),
        ('{"choices": [[7]], "top_k": 5}', "rank 7, but top_k is 5"),
        ('{"choices": [[0], [0, 0]], "num_heads": 1}', "2 deep, but there are 1 heads"),
    ],
)
def test_load_names_the_bad_file(tmp_path, text, message):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json: .*{message}"):
        DraftTree.load(file)


def test_load_of_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        DraftTree.load(tmp_path / "nowhere.json")


def test_save_rejects_what_it_could_not_read_back(tmp_path):
    file = tmp_path / "tree.json"
    with pytest.raises(ValueError, match="metadata must not be named parents, ranks"):
        DraftTree.chain(1).save(file, ranks=[0], parents=[-1])
    with pytest.raises(ValueError, match="JSON"):
        DraftTree.chain(1).save(file, accuracy=float("nan"))
    with pytest.raises(TypeError, match="JSON"):
        DraftTree.chain(1).save(file, device=torch.device("cpu"))
    assert not file.exists()


def test_a_prefix_keeps_the_first_nodes():
    tree = DraftTree.from_parents([-1, 0, 1, 0, 3], [0, 2, 0, 1, 4])
    assert tree.prefix(4) == DraftTree((-1, 0, 1, 0), (0, 2, 0, 1))
    assert tree.prefix(1) == DraftTree.chain(0)
    assert tree.prefix(5) is tree.prefix(9) is tree
    with pytest.raises(ValueError, match="num_nodes must be >= 1, got 0"):
        tree.prefix(0)
