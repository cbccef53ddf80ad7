"""What commands print about trees."""

from ..tree import DraftTree


def describe(tree: DraftTree) -> str:
    """Return a tree's sizes in words."""
    return f"{tree.num_nodes} nodes, depth {tree.max_depth}, leaf paths: {len(tree.leaves)}"


def measures(tree: DraftTree, tokens: float) -> tuple:
    """Return a tree's columns in a table."""
    return tree.num_nodes, tree.max_depth, len(tree.leaves), f"{tokens:.4f}"


def print_table(rows: list[tuple]) -> None:
    """Print rows in columns, the first of them the head."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
