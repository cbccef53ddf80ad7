"""Draft trees as text and as SVG. Depth runs to the right, each leaf has its own line."""

import unicodedata
from collections.abc import Iterable, Sequence
from html import escape

from .build import DraftTree

_MAX_LABEL_WIDTH = 24

# SVG units; the text is 11 high in a monospaced font, about 6.7 wide a character.
_ROW_HEIGHT, _NODE_HEIGHT, _COLUMN_GAP, _MARGIN, _PADDING, _CHARACTER_WIDTH = 22, 17, 34, 12, 12, 6.7
_Box = tuple[int, float, int]  # left edge, middle line, width
_STYLE = (
    "text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#24292f;text-anchor:middle}"
    "rect.node{fill:#f6f8fa;stroke:#8c959f}path{fill:none;stroke:#afb8c1;stroke-width:1.2}"
    ".accepted rect{fill:#dafbe1;stroke:#1a7f37;stroke-width:1.6}.accepted text{font-weight:bold}"
    "path.accepted{stroke:#1a7f37;stroke-width:2.4}"
)


def draw_text(tree: DraftTree, *, labels: Sequence[str] | None = None, accepted: Iterable[int] | None = None) -> str:
    """Draw a tree with box-drawing characters.

        0 ─┬─ 1:0 ─┬─ 3:0
           │       └─ 4:1
           └─ 2:1 ─── 5:0

    Args:
        tree: the tree.
        labels: one for each node, such as token strings; unprintable characters are escaped, long ones cut. By
            default ``node:rank``.
        accepted: node ids of an accepted path, as a row of ``Verification.accepted`` has them (−1 is padding, the root
            is implied); these nodes stand in ``[brackets]``.

    Returns:
        One line for each leaf, without a final newline.

    Raises:
        ValueError: labels that are not one for each node, or accepted nodes that are not a path from the root.

    Example:
        >>> print(draw_text(DraftTree.from_parents([-1, 0, 0, 1]), accepted=[1, 3]))
        [0] ─┬─ [1:0] ─── [3:0]
             └─ 2:1
    """
    marked = _accepted_nodes(tree, accepted)
    shown = [f"[{text}]" if node in marked else text for node, text in enumerate(_node_labels(tree, labels))]
    columns = _column_widths(tree, [_display_width(text) for text in shown])

    # Each line is what stands left of its first node; children are pushed in reverse, so lines come top to bottom.
    lines, stack = [], [(0, "", "")]
    while stack:
        node, line, indent = stack.pop()
        while True:
            line += shown[node]
            children = tree.children[node]
            if not children:
                break
            column = columns[tree.depths[node]]
            padding = column - _display_width(shown[node])
            indent += " " * column
            line += " " + "─" * padding + ("─┬─ " if len(children) > 1 else "─── ")
            for sibling in reversed(children[1:]):
                last = sibling == children[-1]
                stack.append(
                    (sibling, indent + ("  └─ " if last else "  ├─ "), indent + ("     " if last else "  │  "))
                )
            indent += "  │  " if len(children) > 1 else "     "
            node = children[0]
        lines.append(line)
    return "\n".join(lines)


def draw_svg(tree: DraftTree, *, labels: Sequence[str] | None = None, accepted: Iterable[int] | None = None) -> str:
    """Draw a tree as an SVG picture; hovering over a node shows its id, parent, rank and depth.

    Args:
        tree: the tree.
        labels: as in `draw_text`.
        accepted: as in `draw_text`; this path is green.

    Returns:
        The SVG document, complete in itself.

    Raises:
        ValueError: as `draw_text`.

    Example:
        >>> draw_svg(DraftTree.chain(2)).startswith("<svg ")
        True
    """
    marked = _accepted_nodes(tree, accepted)
    texts = _node_labels(tree, labels)
    boxes = _svg_boxes(tree, texts)
    width = max(left + box_width for left, _, box_width in boxes) + _MARGIN
    height = 2 * _MARGIN + _ROW_HEIGHT * len(tree.leaves)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for node in range(1, tree.num_nodes):
        lines.append(_svg_edge(boxes[tree.parents[node]], boxes[node], node in marked))
    for node, text in enumerate(texts):
        title = f"node {node}, parent {tree.parents[node]}, rank {tree.ranks[node]}, depth {tree.depths[node]}"
        lines.append(_svg_node(boxes[node], title, text, node in marked))
    return "\n".join([*lines, "</svg>\n"])


def _svg_boxes(tree: DraftTree, texts: Sequence[str]) -> list[_Box]:
    widths = _column_widths(tree, [round(_display_width(text) * _CHARACTER_WIDTH) + _PADDING for text in texts])
    lefts = [_MARGIN + sum(widths[:depth]) + _COLUMN_GAP * depth for depth in range(len(widths))]
    rows = _node_rows(tree)
    return [
        (lefts[depth], _MARGIN + _ROW_HEIGHT * (rows[node] + 0.5), widths[depth])
        for node, depth in enumerate(tree.depths)
    ]


def _svg_edge(parent: _Box, child: _Box, accepted: bool) -> str:
    start, above, (left, middle, _) = parent[0] + parent[2], parent[1], child
    bend = (start + left) / 2
    style = ' class="accepted"' if accepted else ""
    return f'<path{style} d="M{start} {above:g}C{bend:g} {above:g} {bend:g} {middle:g} {left} {middle:g}"/>'


def _svg_node(box: _Box, title: str, text: str, accepted: bool) -> str:
    left, middle, width = box
    style = ' class="accepted"' if accepted else ""
    return (
        f'<g{style}><title>{title}</title><rect class="node" x="{left}" y="{middle - _NODE_HEIGHT / 2:g}" '
        f'width="{width}" height="{_NODE_HEIGHT}" rx="4"/>'
        f'<text x="{left + width / 2:g}" y="{middle + 4:g}" xml:space="preserve">{escape(text)}</text></g>'
    )


def _accepted_nodes(tree: DraftTree, accepted: Iterable[int] | None) -> set[int]:
    if accepted is None:
        return set()
    path = [0]
    for node in (int(node) for node in accepted):
        if node in (-1, 0):
            continue
        if not 0 < node < tree.num_nodes or tree.parents[node] != path[-1]:
            raise ValueError(f"draw: accepted nodes must be a path from the root, got node {node} after {path[-1]}")
        path.append(node)
    return set(path)


def _node_labels(tree: DraftTree, labels: Sequence[str] | None) -> list[str]:
    if labels is None:
        return ["0", *(f"{node}:{tree.ranks[node]}" for node in range(1, tree.num_nodes))]
    if len(labels) != tree.num_nodes:
        raise ValueError(f"draw: labels must have one entry for each of {tree.num_nodes} nodes, got {len(labels)}")
    return [_cut("".join(c if c.isprintable() else repr(c)[1:-1] for c in label)) for label in labels]


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LABEL_WIDTH else text[: _MAX_LABEL_WIDTH - 1] + "…"


def _display_width(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)


def _column_widths(tree: DraftTree, widths: Sequence[int]) -> list[int]:
    columns = [0] * (tree.max_depth + 1)
    for depth, width in zip(tree.depths, widths, strict=True):
        columns[depth] = max(columns[depth], width)
    return columns


def _node_rows(tree: DraftTree) -> list[float]:
    # Leaves take rows 0, 1, 2, … in drawing order; a parent stands between its first and last child.
    rows, next_row, order, stack = [0.0] * tree.num_nodes, 0, [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(tree.children[node]))
    for node in order:
        if not tree.children[node]:
            rows[node], next_row = next_row, next_row + 1
    for node in reversed(order):
        if tree.children[node]:
            rows[node] = (rows[tree.children[node][0]] + rows[tree.children[node][-1]]) / 2
    return rows
