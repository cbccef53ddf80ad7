"""What the demo says of its run."""

from types import SimpleNamespace

import pytest

from specdec_kernels.cli.demo import Comparison, _print_table, _verdict
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
    _print_table([comparison], DecodeStats(), SimpleNamespace(tree=tree, max_nodes=8), "yes", prepared=True)
    printed = capsys.readouterr().out
    assert size in printed
    assert "2.00 x" in printed
    assert ("draft tree" in printed) == drawn


def test_a_difference_is_told_with_what_explains_it() -> None:
    same, other = Comparison([1, 2], [1, 2], 1.0, 1.0), Comparison([1, 2, 3], [1, 2, 4], 1.0, 1.0)
    assert _verdict([same], False, "bfloat16") == "yes"
    assert _verdict([same, other], False, "float32") == "no: prompt 2 first differs at token 2"
    said = _verdict([other], False, "bfloat16")
    assert said.startswith("no: prompt 1 first differs at token 2 (")
    assert "--dtype float32" in said
    assert _verdict([other], True, "bfloat16").startswith("not compared")
