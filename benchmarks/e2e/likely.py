"""What it brings to leave unlikely nodes out of drafts: decode steps of drafters with several ``min_prob``.

    python -m benchmarks.e2e.likely --prompts FILE --limit 12 --save  # writes benchmarks/results/<device>/e2e_likely_*

All in one process, a prepared model in bf16, batch 1, in turn for each prompt; the prompt's own time is not counted.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.e2e.prompts import OWN_PROMPTS, encode, read_prompts
from benchmarks.e2e.rows import geometric, without_folders
from benchmarks.harness import RESULTS, write_records
from benchmarks.machine import describe_machine
from specdec_kernels.cli import _drafters
from specdec_kernels.decoding import DecodeStats
from specdec_kernels.hf import speculative_generate
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model, load_tokenizer
from specdec_kernels.hf.prepare import prepare


@dataclass(frozen=True)
class Setting:
    """A drafter with one ``min_prob``: means over its steps, and the geometric mean of tokens/s over plain decoding.

    ``rest_ms`` is the part of a step that is not the target's forward: drafting, verification, compaction, the loop.
    """

    drafter: str
    min_prob: float | None
    over_plain: float
    tokens_per_step: float
    nodes: float
    step_ms: float
    rest_ms: float


class Clock:
    """The decode steps of one setting."""

    def __init__(self) -> None:
        self.speeds: list[float] = []
        self.tokens, self.steps, self.nodes, self.ms, self.rest_ms = 0, 0, 0, 0.0, 0.0

    def add(self, stats: DecodeStats) -> None:
        """Add a text; the first token comes from the prompt."""
        ms = (stats.total_time_us - stats.phase_time_us["prefill"]) / 1e3
        self.speeds.append((stats.num_tokens - 1) / ms)
        self.tokens, self.steps, self.ms = (
            self.tokens + stats.num_tokens - 1,
            self.steps + stats.num_steps,
            self.ms + ms,
        )
        self.rest_ms += ms - stats.phase_time_us["forward"] / 1e3
        self.nodes += sum(width * count for width, count in enumerate(stats.width_histogram))

    def over(self, plain: "Clock") -> float:
        """Return the speed over that of plain decoding on the same prompts."""
        return geometric(own / other for own, other in zip(self.speeds, plain.speeds, strict=True))


def measure(model, prompts: Iterable[list[int]], drafters: dict, max_new_tokens: int) -> Iterator[Setting]:
    """Decode every prompt with plain decoding and every drafter, named ``(name, min_prob)``, in turn."""
    clocks = {key: Clock() for key in (("plain", None), *drafters)}
    for number, ids in enumerate(prompts):
        for key, clock in clocks.items():
            stats = DecodeStats()
            options = {"drafter": drafters.get(key), "max_new_tokens": max_new_tokens, "do_sample": False}
            model.generate(torch.tensor([ids]), custom_generate=speculative_generate, stats=stats, **options)
            # A text of one token has no steps.
            if stats.num_steps:
                clock.add(stats)
        print(f"\r{number + 1} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for (name, min_prob), clock in clocks.items():
        means = (round(total / clock.steps, 3) for total in (clock.tokens, clock.nodes, clock.ms, clock.rest_ms))
        yield Setting(name, min_prob, round(clock.over(clocks["plain", None]), 4), *means)


def markdown(path: Path) -> list[str]:
    """Return the table of a result file."""
    columns = ("", "nodes of at least", "nodes", "tokens/step", "ms/step", "outside the forward", "× plain")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for line in path.read_text().splitlines()[1:]:
        row = Setting(**json.loads(line))
        least = "-" if row.min_prob is None else "all" if row.min_prob == 0 else f"{row.min_prob:g}"
        cells = [f"{row.nodes:.1f}", f"{row.tokens_per_step:.2f}", f"{row.step_ms:.1f}", f"{row.rest_ms:.2f}"]
        cells.append(f"{row.over_plain:.2f}")
        lines.append(f"| {row.drafter} | {least} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--drafter", nargs="+", default=["ngram", "medusa", "medusa+ngram"])
    parser.add_argument(
        "--probs", nargs="+", type=float, default=[0.0, 0.03, 0.06, 0.12], help="the least probabilities"
    )
    parser.add_argument("--model", default=PACKAGED_MODEL)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/e2e_likely_*.jsonl")
    _drafters.add_arguments(parser)
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.model), prepare(load_model(args.model, dtype=torch.bfloat16))
    drafters = {}
    for name in args.drafter:
        for min_prob in args.probs:
            args.min_prob = min_prob
            drafters[name, min_prob] = _drafters.make(name, args, model)
    prompts = encode(tokenizer, [question["turns"][0] for question in read_prompts(args.prompts, args.limit)])
    machine = describe_machine(torch.device("cpu"))
    command = "python -m benchmarks.e2e.likely " + " ".join(map(without_folders, sys.argv[1:]))
    records = [
        {"machine": asdict(machine), "command": command, "model": Path(args.model).name, "prompts": len(prompts)}
    ]
    records += map(asdict, measure(model, prompts, drafters, args.max_new_tokens))
    for record in records[1:]:
        print(" ".join(f"{key} {value}" for key, value in record.items()))
    if args.save:
        path = RESULTS / machine.slug / "e2e_likely_bfloat16.jsonl"
        write_records(path, records)
        print(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
