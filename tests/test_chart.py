"""Charts are well-formed, and a point is drawn where the axes say."""

import re
from xml.etree import ElementTree

import pytest

from specdec_kernels._chart import Panel, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*panels):
    return ElementTree.fromstring(line_chart(panels))


def ticks(group):
    """Return value -> place of the vertical axis, and of the horizontal one."""
    texts = [t for t in group.iter(f"{SVG}text") if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", "".join(t.itertext()))]
    vertical = {float(t.text): float(t.get("y")) - 4 for t in texts if t.get("class") == "end"}
    horizontal = {float(t.text): float(t.get("x")) for t in texts if t.get("class") == "middle"}
    return vertical, horizontal


@pytest.mark.parametrize(
    "points",
    [[(0, 0), (10, 5)], [(50, 22.6), (2280, 7.2)], [(-3, 1e-5), (4, 3e-5)], [(1, 2.0)], [(7, -1), (9, -1)]],
    ids=str,
)
def test_points_lie_where_the_ticks_say(points):
    root = drawn(Panel("t", "x", "y", {"line": points}))
    vertical, horizontal = ticks(root)
    assert 2 <= len(vertical) <= 12
    assert 2 <= len(horizontal) <= 12
    places = [tuple(map(float, p.split(","))) for p in root.find(f".//{SVG}polyline").get("points").split()]
    for (x, y), (at_x, at_y) in zip(points, places, strict=True):
        for value, place, axis in ((x, at_x, horizontal), (y, at_y, vertical)):
            low, high = min(axis), max(axis)
            assert low <= value <= high
            share = (value - low) / (high - low)
            assert place == pytest.approx(axis[low] + share * (axis[high] - axis[low]), abs=0.11)


def test_every_panel_and_series_has_its_names():
    panels = [
        Panel("losses & <others>", "step", "nats", {f"a rather long name {i}": [(1, i), (2, i + 1)] for i in range(5)}),
        Panel("nothing yet", "step", "share", {"empty": [], "broken": [(1, float("nan")), (2, 3.0)]}),
    ]
    root = drawn(*panels)
    texts = ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
    assert {"losses & <others>", "nothing yet", "step", "nats", "share"} <= set(texts)
    assert [t.text for t in root.iter(f"{SVG}title")] == [*panels[0].series, *panels[1].series]
    lines = [line.get("points").split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 2, 2, 2, 2, 0, 1]


def test_few_series_have_room_for_longer_names():
    """A name is cut only where others need the place; a tooltip has all of it."""
    name = "best tree of T nodes"

    def shown(count):
        series = {f"{name} {i}": [(1, 2.0)] for i in range(count)}
        return [t[-1].tail for t in drawn(Panel("t", "x", "y", series)).iter(f"{SVG}text") if len(t)]

    assert shown(2) == [f"{name} 0", f"{name} 1"]
    assert all(text.endswith("…") for text in shown(3))
