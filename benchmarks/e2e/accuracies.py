"""The accuracies that a training wrote beside its heads, as tables of the documentation."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

TOPS = (1, 2, 3, 5, 10)


def markdown(path: Path, key: str = "heads") -> list[str]:
    """Return how often the right token is among the best so many of each head.

    Args:
        path: an ``accuracy.json``.
        key: which of its accuracies: ``heads`` or ``greedy_heads``.
    """
    lines = ["| head | token | " + " | ".join(f"top-{top}" for top in TOPS) + " |", "|---" * (2 + len(TOPS)) + "|"]
    for number, cells in enumerate(_shown(path, key), 1):
        lines.append(f"| {number} | t+{number + 1} | {' | '.join(cells)} |")
    return lines


def markdown_by_head(path: Path) -> list[str]:
    """Return a column for each head: top-1 and top-10 of all held-out answers, and top-1 of the greedy ones."""
    wanted = {"all answers, top-1": ("heads", 0), "all answers, top-10": ("heads", -1)}
    wanted["greedy answers, top-1"] = ("greedy_heads", 0)
    rows = {name: [cells[at] for cells in _shown(path, key)] for name, (key, at) in wanted.items()}
    heads = len(rows["all answers, top-1"])
    lines = ["| held-out part | " + " | ".join(f"head {number + 1}" for number in range(heads)) + " |"]
    lines.append("|---" * (1 + heads) + "|")
    return lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]


def _shown(path: Path, key: str) -> list[list[str]]:
    """Return the share within each of `TOPS`, by head."""
    shares: Sequence[Sequence[float]] = json.loads(path.read_text())[key]
    return [[f"{sums[top - 1]:.3f}" for top in TOPS] for sums in ([*accumulate(head)] for head in shares)]
