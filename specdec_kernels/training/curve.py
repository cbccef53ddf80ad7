"""The curve of a training: a line of JSON for each entry, and a picture of all of them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from .._chart import Panel, line_chart

NAME = "training_curve"


def append_entry(path: Path, entry: dict) -> None:
    """Add a line to a curve, floating-point numbers rounded to six digits."""
    rounded = {k: _rounded(v) for k, v in entry.items()}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(rounded) + "\n")


def read_entries(path: Path) -> Iterator[dict]:
    """Yield the entries of a curve; a line cut off by an interruption is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def draw_curve(path: Path, names: Sequence[str] = ()) -> Path:
    """Draw a curve as SVG beside it: losses on the left, what was measured on held-out text on the right.

    Args:
        path: the JSONL file that `Trainer` writes.
        names: of the parts of the loss, in their order; ``head 1``, ``head 2``, … for those without one.
    """
    losses: dict[str, list[tuple[float, float]]] = {}
    measured: dict[str, list[tuple[float, float]]] = {}
    for entry in read_entries(path):
        step = entry["step"]
        if "loss" in entry:
            losses.setdefault("loss", []).append((step, entry["loss"]))
            for index, value in enumerate(entry["head_losses"]):
                losses.setdefault(_name(names, index), []).append((step, value))
        else:
            for key, values in entry.items():
                for index, value in enumerate(values if isinstance(values, list) else []):
                    name = f"{key} {index + 1}" if len(values) > 1 else key
                    measured.setdefault(name.replace("_", " "), []).append((step, value))
    panels = [Panel("training loss", "step", "nats", losses)]
    if measured:
        panels.append(Panel("held-out text", "step", "share of tokens", measured))
    picture = path.with_suffix(".svg")
    picture.write_text(line_chart(panels), encoding="utf-8")
    return picture


def _name(names: Sequence[str], index: int) -> str:
    return names[index] if index < len(names) else f"head {index + 1}"


def _rounded(value):
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
