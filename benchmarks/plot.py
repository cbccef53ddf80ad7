"""Draw the results of a benchmark as SVG, with logarithmic axes of time."""

import json
import re
from pathlib import Path
from typing import Any


def plot(jsonl: Path) -> Path:
    """Draw ``<op>.jsonl`` as ``<op>.svg`` beside it, one group of bars for each case.

    Raises:
        RuntimeError: matplotlib is not installed (``pip install specdec-kernels[bench]``).
    """
    records = _records(jsonl)
    cases = list(dict.fromkeys(record["case"] for record in records))
    # One row a record, and an empty row between cases.
    rows = {(r["case"], r["provider"]): slot + cases.index(r["case"]) for slot, r in enumerate(records)}
    figure = new_figure(9, 1.6 + 0.22 * len(rows))
    axes = figure.subplots()
    for name in dict.fromkeys(record["provider"] for record in records):
        mine = [record for record in records if record["provider"] == name]
        medians = [record["median_us"] for record in mine]
        spread = [
            [record["median_us"] - record["p20_us"] for record in mine],
            [record["p80_us"] - record["median_us"] for record in mine],
        ]
        at = [rows[record["case"], name] for record in mine]
        axes.barh(at, medians, xerr=spread, label=name, error_kw={"linewidth": 0.7})
    of_case = {case: [row for (other, _), row in rows.items() if other == case] for case in cases}
    axes.set_yticks([sum(at) / len(at) for at in of_case.values()], cases)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("median time of a call, µs (whiskers: 20th to 80th percentile)")
    axes.set_title(_title(records))
    figure.legend(loc="outside lower center", ncols=3)
    path = jsonl.with_suffix(".svg")
    figure.savefig(path)
    return path


def plot_growth(jsonl: Path, pattern: str, label: str) -> Path:
    """Draw how the time grows as ``<op>_growth.svg``: a panel for each ``panel`` of the pattern, over its ``x``.

    The dotted line is proportional to x, through our last point.
    """
    records = _records(jsonl)
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for record in records:
        match = re.fullmatch(pattern, record["case"])
        if match:
            series = points.setdefault(match["panel"], {}).setdefault(record["provider"], [])
            series.append((int(match["x"]), record["median_us"]))
    figure = new_figure(4.5 * max(1, len(points)), 4.5)
    panels = figure.subplots(1, max(1, len(points)), sharey=True, squeeze=False)[0]
    for axes, (panel, of_provider) in zip(panels, points.items(), strict=False):
        for name, series in of_provider.items():
            axes.plot(*zip(*sorted(series), strict=True), marker="o", markersize=3, label=name)
        ours = sorted(of_provider["specdec_kernels"])
        xs = [x for x, _ in ours]
        axes.plot(xs, [ours[-1][1] * x / xs[-1] for x in xs], ":", color="black", label="proportional")
        axes.set(xscale="log", yscale="log", xlabel=label, title=f"nodes: {panel}")
    panels[0].set_ylabel("median time of a call, µs")
    figure.suptitle(_title(records))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path = jsonl.with_name(f"{jsonl.stem}_growth.svg")
    figure.savefig(path)
    return path


def plot_speedups(jsonl: Path, pattern: re.Pattern[str], label: str) -> Path:
    """Draw our speed-up over the best baseline: a panel for each ``panel`` of the pattern, over its ``x``.

    Its other groups tell the lines of a panel apart.
    """
    records = _records(jsonl)
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for record in records:
        match = pattern.fullmatch(record["case"])
        if match and record["provider"] == "specdec_kernels":
            groups = {name: text for name, text in match.groupdict().items() if name not in ("panel", "x")}
            line = ", ".join(f"{name} {text}" for name, text in groups.items())
            series = points.setdefault(match["panel"], {}).setdefault(line, [])
            series.append((int(match["x"]), record["speedup_over_best_baseline"]))
    lines = list(dict.fromkeys(line for panel in points.values() for line in panel))
    figure = new_figure(4 * max(1, len(points)), 5)
    panels = figure.subplots(1, max(1, len(points)), sharey=True, squeeze=False)[0]
    for axes, (panel, series_of) in zip(panels, points.items(), strict=False):
        for name, series in series_of.items():
            style = {"color": f"C{lines.index(name) % 10}", "linestyle": "-" if lines.index(name) < 10 else "--"}
            axes.plot(*zip(*sorted(series), strict=True), marker="o", markersize=3, label=name, **style)
        axes.axhline(1, color="black", linewidth=0.7)
        axes.set(xscale="log", xlabel=label, title=panel)
    panels[0].set_ylabel("times as fast as the best baseline")
    figure.suptitle(_title(records))
    handles = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    path = jsonl.with_suffix(".svg")
    figure.savefig(path)
    return path


def _records(jsonl: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in jsonl.read_text().splitlines()]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches.

    Raises:
        RuntimeError: matplotlib is not installed (``pip install specdec-kernels[bench]``).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("drawing needs matplotlib: pip install 'specdec-kernels[bench]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _title(records: list[dict[str, Any]]) -> str:
    machine = records[0]["machine"]
    return f"{records[0]['op']} on {machine['model']}, {machine['threads']} threads, torch {machine['torch']}"
