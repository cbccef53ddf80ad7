"""What the demo says of its run."""

from types import SimpleNamespace

import pytest

from specdec_kernels.cli.demo import Comparison, _print_table
from specdec_kernels.decoding import DecodeStats, DynamicTree
from specdec_kernels.tree import DraftTree


@pytest.mark.parametrize(
    ("tree", "size", "drawn"),
    [
        (DraftTree.from_choices([[0], [1]]), "8 nodes at most\n", True),
        (DynamicTree(8), "8 nodes at most, the likeliest at each step\n", False),
        (None, "8 nodes at most\n", False),
    ],
    ids=["fixed", "dynamic", "none"],
)
def test_table_and_tree(tree, size, drawn, capsys) -> None:
    comparison = Comparison([1, 2, 3, 4], [1, 2, 3, 4], 4.0, 2.0)
    _print_table([comparison], DecodeStats(), SimpleNamespace(tree=tree, max_nodes=8), sampled=False, prepared=True)
    printed = capsys.readouterr().out
    assert size in printed
    assert "2.00 x" in printed
    assert ("draft tree" in printed) == drawn
