"""What a calibration says, as tables of the documentation: the time of a step, and the drafts that are the fastest."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.e2e.sentences import listed
from specdec_kernels.decoding.calibration import calibrations
from specdec_kernels.decoding.learning_budget import LearningBudget

NODES = (1, 4, 8, 16, 32, 128)


def markdown(path: Path) -> list[str]:
    """Return the tables of the only calibration of a file, behind its shortest context."""
    (calibration,) = calibrations(path)
    points = {tuple(map(int, point[:3])): point[3] for point in calibration.steps.points}
    context = min(context for _, context, _ in points)
    batches = sorted({batch for batch, _, _ in points})

    def cell(batch: int, nodes: int) -> str:
        time_us = points.get((batch, context, nodes))
        return "" if time_us is None else f"{time_us / 1e3:.1f}"

    first = {nodes: points[1, context, nodes] for nodes in NODES if (1, context, nodes) in points}
    over = listed(f"{nodes} nodes {time / first[1]:.2f} ×" for nodes, time in first.items() if nodes > 1)
    lines = [_row([f"ms behind {context} tokens, nodes", *(f"B = {batch}" for batch in batches)])]
    lines.append("|---|" + "---|" * len(batches))
    lines += [_row([str(nodes), *(cell(batch, nodes) for batch in batches)]) for nodes in first]
    lines += ["", f"For one row, {over} what one takes. The fastest drafts by this calibration:", ""]
    lines.append(_row(["fastest nodes, over plain decoding", *(f"B = {batch}" for batch in batches)]))
    lines.append("|---|" + "---|" * len(batches))
    for name in calibration.drafters:
        lines.append(_row([name, *_gains(calibration.budget(name), batches, context)]))
    return lines


def _gains(budget: LearningBudget, batches: Iterable[int], context: int) -> Iterable[str]:
    for batch in batches:
        known = budget.budget
        nodes = known.choose(batch, context)
        gain = known.tokens_per_s(nodes, batch, context) / known.tokens_per_s(1, batch, context)
        yield f"{nodes}: {gain:.2f} ×"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
