"""Drawings: exact on small trees, complete and free of overlap on large ones."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from specdec_kernels import DraftTree
from specdec_kernels.testing import random_parents
from specdec_kernels.tree import draw_svg, draw_text, preset

T1 = DraftTree.from_parents([-1, 0, 0, 1, 1, 2])
SVG = "{http://www.w3.org/2000/svg}"


def picture(text: str) -> str:
    return "\n".join(line[4:] for line in text.strip("\n").split("\n"))


def test_text_of_a_small_tree():
    assert draw_text(T1) == picture(
        """
    0 ─┬─ 1:0 ─┬─ 3:0
       │       └─ 4:1
       └─ 2:1 ─── 5:0
    """
    ).rstrip("\n")


def test_text_with_labels_and_an_accepted_path():
    labels = ["The", "cat", "a", "sat", "is", "dog"]
    assert draw_text(T1, labels=labels, accepted=[1, 4, -1, -1]) == picture(
        """
    [The] ─┬─ [cat] ─┬─ sat
           │         └─ [is]
           └─ a ─────── dog
    """
    ).rstrip("\n")


def test_text_with_three_children_and_no_children():
    assert draw_text(DraftTree.chain(0)) == "0"
    assert draw_text(DraftTree.chain(2)) == "0 ─── 1:0 ─── 2:0"
    assert draw_text(DraftTree.from_choices([[0], [1], [4]])).split("\n") == ["0 ─┬─ 1:0", "   ├─ 2:1", "   └─ 3:4"]


def test_text_keeps_the_trunk_beside_inner_branches():
    tree = DraftTree.from_choices([[0], [1], [2], [0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [1, 0, 0], [1, 0, 1]])
    assert draw_text(tree).split("\n") == [
        "0 ─┬─ 1:0 ─── 4:0",
        "   ├─ 2:1 ─┬─ 5:0 ─┬─ 9:0",
        "   │       │       └─ 10:1",
        "   │       └─ 6:1",
        "   └─ 3:2 ─┬─ 7:0",
        "           └─ 8:1",
    ]


def test_wide_and_combining_characters_keep_the_columns():
    lines = draw_text(T1, labels=["根", "日本", "é", "x", "y", "z"]).split("\n")
    assert lines == ["根 ─┬─ 日本 ─┬─ x", "    │        └─ y", "    └─ é ────── z"]


def test_unprintable_characters_are_escaped_and_long_labels_cut():
    labels = ["a\n\tb", "\x00", "é\u200b", "x" * 24, "x" * 25, "\ud800"]
    text = draw_text(T1, labels=labels)
    assert len(text.split("\n")) == 3
    for shown in (r"a\n\tb", r"\x00", r"é\u200b", "x" * 24, "x" * 23 + "…", r"\ud800"):
        assert shown in text
    assert "x" * 25 not in text
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}
    ElementTree.fromstring(draw_svg(T1, labels=labels).encode())


@pytest.mark.parametrize("tree", [preset("mc_sim_7b_63"), DraftTree.from_parents(random_parents(1024, 0, 12))])
def test_large_text_can_be_read_back(tree):
    """Lines in order give the depth-first order; columns give the depths. Together they are the tree."""
    lines = draw_text(tree).split("\n")
    assert len(lines) == len(tree.leaves)
    found = [
        (i, match.start(), int(match[1]))
        for i, line in enumerate(lines)
        for match in re.finditer(r"(\d+)(:\d+)?", line)
    ]
    assert sorted(node for _, _, node in found) == list(range(tree.num_nodes))
    columns = sorted({column for _, column, _ in found})
    path: list[int] = []
    for _, column, node in sorted(found):
        depth = columns.index(column)
        path = [*path[:depth], node]
        assert path == list(tree.path(node))
    assert max(map(len, lines)) < 140


def parse_svg(svg: str):
    root = ElementTree.fromstring(svg)
    groups = root.findall(f"{SVG}g")
    boxes = []
    for group in groups:
        box = group.find(f"{SVG}rect")
        boxes.append(tuple(float(box.get(key)) for key in ("x", "y", "width", "height")))
    return root, groups, boxes


@pytest.mark.parametrize(
    "tree", [DraftTree.chain(0), T1, preset("mc_sim_7b_63"), DraftTree.from_parents(random_parents(1024, 0))]
)
def test_svg_is_complete_and_nothing_overlaps(tree):
    root, groups, boxes = parse_svg(draw_svg(tree))
    assert [group.find(f"{SVG}title").text.split(",")[0] for group in groups] == [
        f"node {i}" for i in range(tree.num_nodes)
    ]
    assert len(root.findall(f"{SVG}path")) == tree.num_nodes - 1
    width, height = float(root.get("width")), float(root.get("height"))
    for x, y, w, h in boxes:
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
    for depth in range(tree.max_depth + 1):
        column = sorted(boxes[node] for node in range(tree.num_nodes) if tree.depths[node] == depth)
        assert len({x for x, *_ in column}) == 1
        assert all(below[1] >= above[1] + above[3] for above, below in pairwise(column))
    for node in range(1, tree.num_nodes):
        parent = boxes[tree.parents[node]]
        assert boxes[node][0] >= parent[0] + parent[2] + 20


def test_svg_edges_join_parent_and_child():
    root, _, boxes = parse_svg(draw_svg(T1))
    for node, edge in enumerate(root.findall(f"{SVG}path"), start=1):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", edge.get("d"))]
        x, y, width, height = boxes[T1.parents[node]]
        assert numbers[:2] == [x + width, y + height / 2]
        x, y, _, height = boxes[node]
        assert numbers[-2:] == [x, y + height / 2]


def test_svg_marks_the_accepted_path_and_escapes_labels():
    root, groups, _ = parse_svg(draw_svg(T1, labels=["<b>", "&", '"', " x", "'", "z"], accepted=[1, 4, -1]))
    assert [i for i, group in enumerate(groups) if group.get("class") == "accepted"] == [0, 1, 4]
    edges = root.findall(f"{SVG}path")
    assert [i for i, edge in enumerate(edges, start=1) if edge.get("class") == "accepted"] == [1, 4]
    assert [group.find(f"{SVG}text").text for group in groups] == ["<b>", "&", '"', " x", "'", "z"]
    assert not any(group.get("class") for group in parse_svg(draw_svg(T1))[1])


@pytest.mark.parametrize("draw", [draw_text, draw_svg])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ["a"]}, "one entry for each of 6 nodes, got 1"),
        ({"accepted": [3]}, "must be a path from the root, got node 3 after 0"),
        ({"accepted": [1, 5]}, "got node 5 after 1"),
        ({"accepted": [6]}, "got node 6 after 0"),
        ({"accepted": [-2]}, "got node -2 after 0"),
    ],
)
def test_rejects(draw, options, message):
    with pytest.raises(ValueError, match=message):
        draw(T1, **options)


def test_accepted_nothing_marks_the_root_alone():
    assert draw_text(T1, accepted=[-1, -1]).startswith("[0] ─┬─ 1:0")
    assert draw_text(T1, accepted=[0, 1]).startswith("[0] ─┬─ [1:0]")
