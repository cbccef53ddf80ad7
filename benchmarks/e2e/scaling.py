"""Tokens per second by context, by batch and by nodes: plain, speculative, and what the calibration expects.

    python -m benchmarks.e2e.scaling --prepare --drafter medusa+ngram --save
    python -m benchmarks.e2e.scaling --prepare --drafter medusa+ngram --sweep batch --batch-sizes 1 2 4 8 16
    python -m benchmarks.e2e.scaling --prepare --contexts 256 --batch-sizes 1 4 --nodes 1 8 --max-new-tokens 16

Each row continues a chat about a piece of this repository's documents; rows differ. Only decode steps are timed, the
prefill is not. Providers take turns on the same prompts: ``plain`` (our loop without drafts), ``budget`` (drafts sized
by the calibration, see docs/generation.md), ``largest`` (always whole drafts); by nodes, drafts of at most so many. The
model's value at a point is the tokens per step of that run over the calibrated time of its steps: run
``specdec-kernels calibrate`` with the same drafter first.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.e2e import sentences
from benchmarks.e2e.rows import Run
from benchmarks.harness import RESULTS, write_records
from benchmarks.machine import describe_machine
from specdec_kernels._chart import Panel, line_chart
from specdec_kernels.cli import _drafters
from specdec_kernels.decoding import DecodeStats, GreedyAcceptance, decode
from specdec_kernels.decoding.budget import Budget, FixedBudget
from specdec_kernels.decoding.calibration import Calibration, Setting, file_of
from specdec_kernels.decoding.drafters import PlainDrafter
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model, load_tokenizer
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.hf.target import HFTarget

DOCUMENTS = Path(__file__).parents[2] / "docs"
QUESTION = "Summarize this text:\n\n"
SWEEPS = {"context": "tokens of context", "batch": "rows", "nodes": "nodes at most"}


@dataclass
class Point:
    """One provider at one point of a sweep: medians over the repeats.

    ``widths`` is what `DecodeStats.width_histogram` holds, of all repeats; ``model_tokens_per_s`` what the calibration
    says for these steps.
    """

    sweep: str
    x: int
    provider: str
    context_len: int
    batch_size: int
    tokens_per_s: float
    tokens_per_step: float
    step_ms: float
    widths: list[int]
    model_tokens_per_s: float


class KeptPrefill(HFTarget):
    """A target that runs its prompts once: later prefills take back what was decoded since."""

    _first = None

    def prefill(self, ids, lengths):
        """Return what the first call returned."""
        if self._first is None:
            self._first = super().prefill(ids, lengths)
        else:
            self.run_only(range(len(ids)))
            self.truncate(lengths)
        return self._first


def prompts_of(tokenizer, context_len: int, batch_size: int) -> torch.Tensor:
    """Return ``(B, context_len)`` chat prompts about pieces of the documents."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.md")))
    pieces = tokenizer(text, add_special_tokens=False)["input_ids"]
    chat = [{"role": "user", "content": QUESTION + "\x00"}]
    template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in template.split("\x00"))
    room = context_len - len(before) - len(after)
    rows = []
    for row in range(batch_size):
        start = row * len(pieces) // batch_size
        piece = [pieces[(start + i) % len(pieces)] for i in range(room)]
        rows.append([*before, *piece, *after])
    return torch.tensor(rows)


def measure(args, model, tokenizer, drafter, calibration: Calibration, sweep: str, x: int) -> Iterator[Point]:
    """Run every provider of a point, in turn, and yield what came out."""
    context_len = x if sweep == "context" else args.contexts[0]
    batch_size = x if sweep == "batch" else args.batch_sizes[0]
    ids = prompts_of(tokenizer, context_len, batch_size)
    lengths = torch.full((batch_size,), context_len, dtype=torch.int32)
    target = KeptPrefill(model, batch_size, context_len + args.max_new_tokens - 1 + drafter.max_nodes)
    providers: dict[str, tuple[object, Budget | None]] = {"plain": (PlainDrafter(), None)}
    if sweep == "nodes":
        providers = {"speculative": (drafter, FixedBudget(x))}
    else:
        providers |= {"budget": (drafter, calibration.budget(args.drafter)), "largest": (drafter, None)}
    stats: dict[str, list[DecodeStats]] = {name: [] for name in providers}
    for turn in range(args.repeats + 1):
        for name, (own, budget) in providers.items():
            found = DecodeStats()
            limit = args.max_new_tokens if turn else 4  # warms up
            options = {"acceptance": GreedyAcceptance(), "max_new_tokens": limit, "stats": found, "budget": budget}
            for _ in decode(target, own, ids, lengths, **options):
                pass
            stats[name] += [found] if turn else []
    for name, runs in stats.items():
        yield summarise(calibration, args.drafter, sweep, x, name, (context_len, batch_size), runs)


def summarise(
    calibration: Calibration,
    drafter: str,
    sweep: str,
    x: int,
    provider: str,
    sizes: tuple[int, int],
    runs: Sequence[DecodeStats],
) -> Point:
    """Turn the statistics of a provider into a point."""
    context_len, batch_size = sizes
    seconds = [(run.total_time_us - run.phase_time_us["prefill"]) / 1e6 for run in runs]
    speeds = [(run.num_tokens - run.num_rows) / s for run, s in zip(runs, seconds, strict=True)]
    widths = [0] * max(len(run.width_histogram) for run in runs)
    for run in runs:
        for width, count in enumerate(run.width_histogram):
            widths[width] += count
    # The context grows while tokens are added; its middle stands for all steps.
    middle = context_len + runs[0].num_tokens // (2 * batch_size)
    step_us = calibration.step_us(drafter)
    modelled = sum(count * step_us(width, batch_size, middle) for width, count in enumerate(widths) if count)
    tokens = sum(run.num_tokens - run.num_rows for run in runs)
    return Point(
        *(sweep, x, provider, context_len, batch_size, round(statistics.median(speeds), 2)),
        tokens_per_step=round(runs[0].tokens_per_step, 3),
        step_ms=round(statistics.median(1e3 * s / run.num_steps for s, run in zip(seconds, runs, strict=True)), 2),
        widths=widths,
        model_tokens_per_s=round(tokens / modelled * 1e6, 2),
    )


def result_file(drafter: str, *, prepared: bool, dtype: str) -> Path:
    """Return this machine's result file."""
    name = "_".join(["e2e_scaling", drafter, *(["prepared"] if prepared else []), dtype])
    return RESULTS / describe_machine(torch.device("cpu")).slug / f"{name}.jsonl"


def save(path: Path, points: Sequence[Point], calibration: Path) -> Path:
    """Write the machine, the command, what it used and the points; points of sweeps that were not run are kept."""
    run = {point.sweep for point in points}
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [record for record in old if "sweep" in record and record["sweep"] not in run]
    command = "python -m benchmarks.e2e.scaling " + " ".join(Path(a).name if "/" in a else a for a in sys.argv[1:])
    machine = asdict(describe_machine(torch.device("cpu")))
    used = {"shipped": sentences.shipped(), "calibration": digest(calibration)}
    head = {"machine": machine, "command": command, **used}
    records = [head, *sorted([*kept, *map(asdict, points)], key=lambda record: list(SWEEPS).index(record["sweep"]))]
    write_records(path, records)
    return plot(path)


def read_points(path: Path) -> list[Point]:
    """Return the points of a result file."""
    records = map(json.loads, path.read_text().splitlines())
    return [Point(**record) for record in records if "sweep" in record]


def markdown(path: Path) -> list[str]:
    """Return two tables of a result file: contexts and batches by provider, then nodes; and what is older than it.

    What the model says is given over what was measured.
    """
    points, head = read_points(path), json.loads(path.read_text().partition("\n")[0])
    at: dict[tuple[str, int], dict[str, Point]] = {}
    for point in points:
        at.setdefault((point.sweep, point.x), {})[point.provider] = point
    lines = _header("tokens/s", "plain", "budget", "largest", "budget / plain", "tokens/step", "model / measured")
    for (sweep, _), found in at.items():
        if sweep != "nodes":
            own = [found[name] for name in ("plain", "budget", "largest")]
            rows, context = f"B = {own[0].batch_size}", f"{own[0].context_len} tokens"
            cells = [f"{rows}, {context}" if sweep == "batch" else f"{context}, {rows}"]
            cells += [f"{point.tokens_per_s:.0f}" for point in own]
            cells += [f"{own[1].tokens_per_s / own[0].tokens_per_s:.2f} ×"]
            cells += [" / ".join(f"{point.tokens_per_step:.2f}" for point in own)]
            cells += [" / ".join(f"{point.model_tokens_per_s / point.tokens_per_s:.2f}" for point in own)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_header("nodes at most", "tokens/s", "tokens/step", "ms/step", "model / measured")]
    for point in (point for point in points if point.sweep == "nodes"):
        cells = [f"{point.x}", f"{point.tokens_per_s:.0f}", f"{point.tokens_per_step:.2f}", f"{point.step_ms:.1f}"]
        lines.append(f"| {' | '.join(cells)} | {point.model_tokens_per_s / point.tokens_per_s:.2f} |")
    notes = sentences.age(Run(head, [])).strip(), _calibration_age(head)
    return [*lines, "", f"`{head['command']}`. {' '.join(filter(None, notes))}".strip()]


def _calibration_age(head: dict) -> str:
    """Return what there is to say if the calibration of a run is not known to be the shipped one."""
    if "calibration" not in head:
        return "Nor does it say which calibration the budgets and the model are from."
    shipped = file_of(_drafters.SHIPPED_HEADS, head["machine"]["model"])
    return "" if shipped.exists() and digest(shipped) == head["calibration"] else "The calibration is another one now."


def digest(path: Path) -> str:
    """Return a short name of what a file holds."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _header(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def plot(path: Path) -> Path:
    """Draw a result file as SVG beside it."""
    points = read_points(path)
    panels = []
    for sweep, label in SWEEPS.items():
        mine = [point for point in points if point.sweep == sweep]
        series = {}
        for name in dict.fromkeys(point.provider for point in mine):
            own = sorted((point for point in mine if point.provider == name), key=lambda point: point.x)
            series[name] = [(point.x, point.tokens_per_s) for point in own]
            series[f"{name}, model"] = [(point.x, point.model_tokens_per_s) for point in own]
        if mine:
            panels.append(Panel(f"tokens/s by {label}", label, "tokens/s, all rows", series))
    svg = path.with_suffix(".svg")
    svg.write_text(line_chart(panels), encoding="utf-8")
    return svg


def main() -> int:
    """Run the sweeps named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", nargs="+", choices=tuple(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 8000], help="the first one is "
                        "that of the other sweeps")  # fmt: skip
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="likewise")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prepare", action="store_true", help="decode with a prepared model")
    parser.add_argument("--drafter", choices=_drafters.NAMES, default="medusa+ngram", metavar="NAME")
    parser.add_argument("--calibration", type=Path, help="file or folder (default: the folder of the heads)")
    parser.add_argument("--model", default=PACKAGED_MODEL)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/e2e_scaling_*.jsonl")
    _drafters.add_arguments(parser)
    args = parser.parse_args()
    _drafters.check(args.drafter, args)
    setting = Setting.here(torch.device("cpu"), getattr(torch, args.dtype), prepared=args.prepare)
    calibration_file = file_of(args.calibration or _drafters.folder_of("heads", args), setting.device)
    calibration = Calibration.load(calibration_file, setting)
    model, tokenizer = load_model(args.model, dtype=getattr(torch, args.dtype)), load_tokenizer(args.model)
    drafter = _drafters.make(args.drafter, args, model)
    model = prepare(model) if args.prepare else model
    points = []
    print(f"{'sweep':<9}{'x':>6}  {'provider':<12}{'tokens/s':>9}{'model':>9}{'tok/step':>9}{'step ms':>9}")
    for sweep in args.sweep:
        nodes = [count for count in args.nodes if count <= drafter.max_nodes]
        for x in {"context": args.contexts, "batch": args.batch_sizes, "nodes": nodes}[sweep]:
            for point in measure(args, model, tokenizer, drafter, calibration, sweep, x):
                points.append(point)
                values = f"{point.tokens_per_s:>9.1f}{point.model_tokens_per_s:>9.1f}{point.tokens_per_step:>9.2f}"
                print(f"{sweep:<9}{x:>6}  {point.provider:<12}{values}{point.step_ms:>9.1f}", flush=True)
    if args.save:
        path = result_file(args.drafter, prepared=args.prepare, dtype=args.dtype)
        print(f"\nwrote {os.path.relpath(path)} and {save(path, points, calibration_file).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
