"""Tables and the SVG of a result file of `benchmarks.e2e.compare`, and the figures in the documentation.

python -m benchmarks.e2e.report FILE      # the tables, and FILE's SVG beside it
python -m benchmarks.e2e.report --write   # put the tables between the markers of README.md, docs and examples
"""

import argparse
import math
import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import attention_tables
from benchmarks import plot as drawing
from benchmarks.e2e import accuracies, calibrated, likely, replayed, scaling, sentences, steps
from benchmarks.e2e.catalogue import OURS, PROVIDERS
from benchmarks.e2e.rows import Row, Run, geometric, percentile, read_run
from benchmarks.e2e.sentences import same_texts
from benchmarks.e2e.shown import by_speed, fastest, label, shown
from benchmarks.harness import RESULTS

ROOT = Path(__file__).parents[2]
# A `generate` whose two candidates lie this close, in bf16 units in the last place, is decided by rounding.
NEAR_TIE_ULP = 4.0
COLUMNS = ("tokens/s", "median", "p20–p80", "× HF", "tokens/step", "ms/step", "peak MB", "= HF", "= own plain")
PHASE_COLUMNS = ("whole call × HF", "first token ms", "× HF", "then tokens/s", "× HF")


def progress(rows: list[Row]) -> str:
    """Return a batch in a line: everybody's tokens/s, and which texts differ from what."""
    speeds = {row.provider: row.tokens_per_s for row in rows}
    timed = [f"{name} {speed:.1f}" for name, speed in speeds.items() if not math.isnan(speed)]
    differing = [
        f"{row.provider}≠{standard} {row.question_id}@{at}"
        for row in rows
        for standard, at in row.differs_from.items()
        if at is not None
    ]
    return (f"tokens/s: {', '.join(timed)}  " if timed else "") + (", ".join(differing) or "all equal")


def figures(run: Run, provider: str) -> list[str]:
    """Return a provider's `COLUMNS` for reading; ``-`` stands for what is not known."""
    rows = run.of(provider)
    speeds = [row.tokens_per_s for row in rows]
    steps = [row.tokens_per_step for row in rows if row.tokens_per_step is not None]
    passes = [row.step_ms for row in rows if not math.isnan(row.step_ms)]
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    return [
        shown("{:.1f}", geometric(speeds)),
        shown("{:.1f}", statistics.median(speeds)),
        f"{shown('{:.1f}', percentile(speeds, 0.2))}–{shown('{:.1f}', percentile(speeds, 0.8))}",
        shown("{:.2f}", run.speed_up(provider, "generate")),
        shown("{:.2f}", statistics.mean(steps) if steps else math.nan),
        shown("{:.1f}", statistics.median(passes) if passes else math.nan),
        shown("{:.0f}", max(peaks) / 1e6 if peaks else math.nan),
        same_texts(rows, "generate"),
        same_texts(rows, PROVIDERS[provider].standard),
    ]


def phases(run: Run, provider: str) -> list[str]:
    """Return what a provider takes for the prompt and what it does after it, by `PHASE_COLUMNS`."""
    rows, others = run.of(provider), {row.question_id: row for row in run.of("generate")}
    firsts = [row.first_token_s for row in rows if row.first_token_s is not None]
    shared = [(row, others[row.question_id]) for row in rows if row.question_id in others]
    sooner = [o.first_token_s / r.first_token_s for r, o in shared if r.first_token_s and o.first_token_s]
    speeds = [row.decode_tokens_per_s for row in rows]
    faster = [row.decode_tokens_per_s / other.decode_tokens_per_s for row, other in shared]
    # A text of one token has nothing after it.
    speeds, faster = ([value for value in values if not math.isnan(value)] for values in (speeds, faster))
    return [
        shown("{:.2f}", run.speed_up(provider, "generate")),
        shown("{:.0f}", statistics.median(firsts) * 1e3 if firsts else math.nan),
        shown("{:.2f}", geometric(sooner)),
        shown("{:.1f}", geometric(speeds)),
        shown("{:.2f}", geometric(faster)),
    ]


def tasks(run: Run) -> list[str]:
    """Return the kinds of task in the order of the run."""
    return list(dict.fromkeys(row.task for row in run.rows))


def table(run: Run) -> list[str]:
    """Return the tables for a terminal."""
    lines = [f"{'provider':<22}" + "".join(f"{column:>13}" for column in COLUMNS)]
    for name in run.providers():
        lines.append(f"{name:<22}" + "".join(f"{text:>13}" for text in figures(run, name)))
    kinds = tasks(run)
    lines += ["", f"{'× HF by task':<22}" + "".join(f"{task:>16}" for task in kinds)]
    for name in run.providers():
        ratios = (run.speed_up(name, "generate", task) for task in kinds)
        lines.append(f"{name:<22}" + "".join(f"{shown('{:.2f}', ratio):>16}" for ratio in ratios))
    if any(row.first_token_s is not None for row in run.rows):
        lines += ["", f"{'prompt, and after it':<22}" + "".join(f"{column:>17}" for column in PHASE_COLUMNS)]
        lines += [f"{name:<22}" + "".join(f"{text:>17}" for text in phases(run, name)) for name in run.providers()]
    lines += [f"without {name}: {reason}" for name, reason in run.head.get("absent", {}).items()]
    return lines + _gaps(run)


def _gaps(run: Run) -> list[str]:
    gaps = [row.gap_ulp for row in run.rows if row.gap_ulp is not None]
    if not gaps:
        return []
    near = sum(gap <= NEAR_TIE_ULP for gap in gaps)
    return [
        f"first differences from generate: {len(gaps)}; {near} are near-ties of its run (<= {NEAR_TIE_ULP:g} bf16 "
        f"ulp); gaps: median {statistics.median(gaps):.1f}, largest {max(gaps):.1f} ulp"
    ]


def markdown(run: Run, *names: str) -> list[str]:
    """Return the one table, the fastest provider last but for ours, which follow in the same order.

    Args:
        names: the providers to show, of those that there are; all when there are none.
    """
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name in (name for name in by_speed(run) if not names or name in names):
        cells = figures(run, name)
        best = not names and name == fastest(run, run.providers())
        lines.append(f"| {label(name)} | " + " | ".join(f"**{c}**" if best else c for c in cells) + " |")
    return lines


def markdown_tasks(run: Run) -> list[str]:
    """Return the speed-up over HF by kind of task."""
    kinds = tasks(run)
    lines = ["| × HF `generate` | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for name in by_speed(run):
        ratios = (run.speed_up(name, "generate", task) for task in kinds)
        lines.append(f"| {label(name)} | " + " | ".join(shown("{:.2f}", ratio) for ratio in ratios) + " |")
    return lines


def markdown_drafters(run: Run, *names: str) -> list[str]:
    """Return what some providers bring on the same prompts, in this order, and the speed-up over HF by kind of task.

    Those that were not asked are left out; ``-`` stands for a kind of task that one was not asked.
    """
    kinds = tasks(run)
    columns = ("tokens/step", "tokens/s", "× HF", *(f"× HF, {kind}" for kind in kinds))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name in (name for name in names if name in run.providers()):
        rows = run.of(name)
        steps = [row.tokens_per_step for row in rows if row.tokens_per_step is not None]
        cells = [shown("{:.2f}", statistics.mean(steps) if steps else math.nan)]
        cells.append(shown("{:.1f}", geometric(row.tokens_per_s for row in rows)))
        cells += [shown("{:.2f}", run.speed_up(name, "generate", kind)) for kind in (None, *kinds)]
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return lines


def markdown_phases(run: Run) -> list[str]:
    """Return what the prompt takes and the rate after it."""
    lines = ["| | " + " | ".join(PHASE_COLUMNS) + " |", "|---|" + "---|" * len(PHASE_COLUMNS)]
    return [*lines, *(f"| {label(name)} | " + " | ".join(phases(run, name)) + " |" for name in by_speed(run))]


def markdown_prompts(run: Run) -> list[str]:
    """Return the rate after the prompt over that of our plain decoding, for every prompt."""
    prompts = list(dict.fromkeys((row.question_id, row.task) for row in run.rows))
    plain = {row.question_id: row.decode_tokens_per_s for row in run.of("plain")}
    lines = ["| then tokens/s × own plain | " + " | ".join(task for _, task in prompts) + " |"]
    lines.append("|---|" + "---|" * len(prompts))
    for name in run.providers():
        found = {row.question_id: row.decode_tokens_per_s / plain[row.question_id] for row in run.of(name)}
        cells = (shown("{:.2f}", found.get(question, math.nan)) for question, _ in prompts)
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return lines


# What stands between ``<!-- NAME FILE … -->`` and ``<!-- /NAME -->`` in the documentation. FILE.jsonl is a result, or
# FILE ends in .json and lies in the repository; words behind it are given to the block, too.
BLOCKS: dict[str, Callable[..., list[str]]] = {
    "e2e": lambda path, *names: markdown(read_run(path), *names),
    "e2e-about": sentences.about,
    "e2e-first-tokens": sentences.first_tokens,
    "e2e-over-plain": sentences.over_plain,
    "e2e-memory": sentences.memory,
    "e2e-texts": sentences.texts,
    "e2e-calibration": calibrated.markdown,
    "accuracies": accuracies.markdown,
    "accuracies-by-head": accuracies.markdown_by_head,
    "e2e-tasks": lambda path: markdown_tasks(read_run(path)),
    "e2e-drafters": lambda path, *names: markdown_drafters(read_run(path), *names),
    "e2e-phases": lambda path: markdown_phases(read_run(path)),
    "e2e-prompts": lambda path: markdown_prompts(read_run(path)),
    "e2e-likely": likely.markdown,
    "e2e-replayed": replayed.markdown,
    "e2e-steps": steps.markdown,
    "attention": attention_tables.grid,
    "attention-others": attention_tables.others,
    "attention-growth": attention_tables.growth,
    "attention-summary": attention_tables.summary,
    "e2e-scaling": scaling.markdown,
    "launch-overhead": attention_tables.overhead,
}
MARKER = re.compile(rf"<!-- ({'|'.join(BLOCKS)}) (\S+)((?: \S+)*) -->\n.*?<!-- /\1 -->", re.DOTALL)


def filled(text: str, results: Path = RESULTS) -> str:
    """Return a page with its marked blocks rewritten from the files that they name."""

    def block(match: re.Match[str]) -> str:
        name, file, words = match.groups()
        path = ROOT / file if file.endswith(".json") else results / f"{file}.jsonl"
        lines = BLOCKS[name](path, *words.split())
        return "\n".join([f"<!-- {name} {file}{words} -->", "", *lines, "", f"<!-- /{name} -->"])

    return MARKER.sub(block, text)


def pages() -> list[Path]:
    """Return the pages that have marked blocks."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
    return [path for path in paths if MARKER.search(path.read_text())]


def plot(path: Path) -> Path:
    """Draw a result file: tokens/s with p20 and p80 of every provider, and the speed-up over HF by kind of task."""
    run = read_run(path)
    names = by_speed(run)
    figure = drawing.new_figure(11, 1.8 + 0.3 * len(names))
    bars, points = figure.subplots(1, 2, sharey=True)
    for slot, name in enumerate(names):
        speeds = [row.tokens_per_s for row in run.of(name)]
        middle = statistics.median(speeds)
        spread = [[middle - percentile(speeds, 0.2)], [percentile(speeds, 0.8) - middle]]
        color = "tab:blue" if name in OURS else "tab:gray"
        bars.barh(slot, middle, xerr=spread, color=color, error_kw={"linewidth": 0.8})
    for task in tasks(run):
        points.plot([run.speed_up(name, "generate", task) for name in names], range(len(names)), "o", ms=4, label=task)
    bars.set_yticks(range(len(names)), [label(name).replace("`", "") for name in names])
    bars.set_xlabel("tokens/s, median over prompts (whiskers: p20 and p80)")
    points.axvline(1, color="black", linewidth=0.7)
    points.set_xlabel("tokens/s over HF generate, by kind of task (geometric mean)")
    points.legend(fontsize="small")
    # The slowest may have been asked for a few prompts only.
    figure.suptitle(_title(run.head, max(len(run.of(name)) for name in names)))
    svg = path.with_suffix(".svg")
    figure.savefig(svg)
    return svg


def _title(head: dict[str, Any], prompts: int) -> str:
    machine = head["machine"]
    return (
        f"{head['model']}, {head['dtype']}, batch {head['batch_size']}, {prompts} prompts, {head['max_new_tokens']} "
        f"new tokens, {machine['model']}, {machine['threads']} threads"
    )


def main() -> None:
    """Print the tables of a file, draw it, and rewrite the documentation if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--write", action="store_true", help="rewrite every marked block from the result file it names")
    args = parser.parse_args()
    if args.file is not None:
        run = read_run(args.file)
        print("\n".join([run.head["command"], *table(run)]))
        print(f"wrote {os.path.relpath(plot(args.file))}")
    for page in pages() if args.write else ():
        page.write_text(filled(page.read_text()))
        print(f"wrote {os.path.relpath(page)}")


if __name__ == "__main__":
    main()
