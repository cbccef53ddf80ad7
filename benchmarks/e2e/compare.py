"""Whole calls of plain and speculative decoding on the same prompts, interleaved, with the texts compared.

    python -m benchmarks.e2e.compare --dtype bfloat16 --batch-size 1
    python -m benchmarks.e2e.compare --dtype float32 --batch-size 4 --prompts FILE

Prompts are JSON lines in the format of Spec-Bench: ``question_id``, ``task``, ``turns`` (the first turn is used).
A difference in bf16 is explained by the plain run itself: the gap between its two candidates' logits at that position,
in units in the last place of bf16. Zero or a few units is a tie that rounding decides.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.harness import RESULTS
from benchmarks.machine import describe_machine
from specdec_kernels.cli.demo import SHIPPED_HEADS
from specdec_kernels.decoding.drafters.medusa import MedusaDrafter
from specdec_kernels.decoding.stats import DecodeStats
from specdec_kernels.hf.generate import speculative_generate
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model, load_tokenizer

OWN_PROMPTS = Path(__file__).parent / "prompts.jsonl"
# A plain run whose two candidates lie this close, in bf16 units in the last place, is decided by rounding.
NEAR_TIE_ULP = 4.0


@dataclass
class Row:
    """One prompt under one drafter, against plain ``generate``; times and ``batch_tokens`` are those of its batch."""

    question_id: int
    task: str
    drafter: str
    new_tokens: int
    batch_tokens: int
    plain_s: float
    speculative_s: float
    tokens_per_step: float
    first_difference: int | None
    gap_ulp: float | None

    @property
    def speed_up(self) -> float:
        """Plain time over speculative time."""
        return self.plain_s / self.speculative_s


def read_prompts(path: Path, limit: int | None) -> list[dict]:
    """Return the first ``limit`` questions of a file."""
    with path.open() as file:
        return [json.loads(line) for line in file if line.strip()][:limit]


def encode(tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    """Return left-padded chat prompts."""
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": text}] for text in texts]
    return dict(
        tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
    )


def timed(function) -> tuple[float, torch.Tensor]:
    """Return the seconds of a call and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Return where two rows begin to differ, None when they are equal; both are padded alike after their end."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def bf16_gap(model, inputs: dict, position: int, row: int, ids: tuple[int, int], options: dict) -> float:
    """Return how far apart the plain run's logits of two tokens are at a position, in bf16 ulp of the greater one."""
    options = {**options, "max_new_tokens": position + 1}
    plain = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    ours, theirs = (float(plain.logits[position][row, i]) for i in ids)
    ulp = 2.0 ** (math.floor(math.log2(max(abs(ours), abs(theirs), 1e-30))) - 7)
    return abs(ours - theirs) / ulp


def compare_batch(model, drafter, inputs: dict, options: dict) -> tuple[float, float, DecodeStats, list]:
    """Decode a batch twice; return both times, the statistics, and for each row (tokens, first difference, gap)."""
    stats = DecodeStats()
    prompt_len = inputs["input_ids"].shape[1]
    plain_s, plain = timed(lambda: model.generate(**inputs, **options))
    speculative = {**options, "custom_generate": speculative_generate, "drafter": drafter, "stats": stats}
    speculative_s, ours = timed(lambda: model.generate(**inputs, **speculative))
    rows = []
    for index, (a, b) in enumerate(zip(plain[:, prompt_len:].tolist(), ours[:, prompt_len:].tolist(), strict=True)):
        where = first_difference(a, b)
        if where is None and len(a) != len(b):
            where = min(len(a), len(b))
        gap = None
        if where is not None and where < min(len(a), len(b)):
            gap = bf16_gap(model, inputs, where, index, (a[where], b[where]), options)
        eos = model.generation_config.eos_token_id
        ends = [i for i, token in enumerate(b) if token in (eos if isinstance(eos, list) else [eos])]
        rows.append((ends[0] + 1 if ends else len(b), where, gap))
    return plain_s, speculative_s, stats, rows


def run_all(args, model, tokenizer, drafter) -> list[Row]:
    """Compare every batch; print a line each."""
    questions = read_prompts(args.prompts, args.limit)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    compare_batch(model, drafter, encode(tokenizer, ["Hello"] * args.batch_size), {**options, "max_new_tokens": 16})
    rows: list[Row] = []
    for start in range(0, len(questions), args.batch_size):
        batch = questions[start : start + args.batch_size]
        inputs = encode(tokenizer, [q["turns"][0] for q in batch])
        plain_s, speculative_s, stats, results = compare_batch(model, drafter, inputs, options)
        batch_tokens = sum(tokens for tokens, _, _ in results)
        for question, (tokens, where, gap) in zip(batch, results, strict=True):
            rows.append(
                Row(
                    *(question["question_id"], question["task"], args.drafter, tokens, batch_tokens),
                    *(plain_s, speculative_s, stats.tokens_per_step, where, gap),
                )
            )
        new = rows[-len(batch) :]
        differing = [f"{r.question_id}@{r.first_difference}" for r in new if r.first_difference is not None]
        print(
            f"{len(rows):3}/{len(questions)}  plain {plain_s:6.2f} s  speculative {speculative_s:6.2f} s  "
            f"x{plain_s / speculative_s:.2f}  {stats.tokens_per_step:.2f} tokens/step  "
            + (f"differs: {', '.join(differing)}" if differing else "identical"),
            flush=True,
        )
    return rows


def summary(rows: list[Row]) -> list[str]:
    """Return the table by task, and the verdict on equality."""
    tasks = defaultdict(list)
    for row in rows:
        tasks[row.task].append(row)
    tasks["all"] = rows
    lines = [f"{'task':<16}{'plain tok/s':>12}{'speculative':>13}{'speed-up':>10}{'tokens/step':>13}{'identical':>12}"]
    for task, group in tasks.items():
        plain = geometric([r.batch_tokens / r.plain_s for r in group])
        ours = geometric([r.batch_tokens / r.speculative_s for r in group])
        same = sum(r.first_difference is None for r in group)
        lines.append(
            f"{task:<16}{plain:>12.1f}{ours:>13.1f}{geometric([r.speed_up for r in group]):>9.2f}x"
            f"{statistics.mean(r.tokens_per_step for r in group):>13.2f}{same:>7} of {len(group)}"
        )
    gaps = [r.gap_ulp for r in rows if r.gap_ulp is not None]
    if gaps:
        near = sum(gap <= NEAR_TIE_ULP for gap in gaps)
        lines.append(
            f"first differences: {len(gaps)} of {len(rows)} prompts; {near} are near-ties of the plain run "
            f"(<= {NEAR_TIE_ULP:g} bf16 ulp); gaps: median {statistics.median(gaps):.1f}, largest {max(gaps):.1f} ulp"
        )
    return lines


def geometric(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.mean(math.log(v) for v in values))


def write_results(args, rows: list[Row], lines: list[str]) -> Path:
    """Write the machine, the command, the rows and the summary to this machine's result file."""
    machine = describe_machine(torch.device("cpu"))
    path = RESULTS / machine.slug / f"e2e_{args.drafter}_{args.dtype}_b{args.batch_size}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Paths are this machine's own; a file name says which prompts and heads were used.
    command = "python -m benchmarks.e2e.compare " + " ".join(Path(a).name if "/" in a else a for a in sys.argv[1:])
    head = {"machine": asdict(machine), "command": command}
    records = [head, *(asdict(row) for row in rows), {"summary": lines}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def main() -> int:
    """Run the comparison named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--limit", type=int, help="use only the first prompts")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--drafter", choices=("medusa",), default="medusa")
    parser.add_argument("--heads", type=Path, default=SHIPPED_HEADS)
    parser.add_argument("--model", default=PACKAGED_MODEL)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/e2e_*.jsonl")
    args = parser.parse_args()
    model = load_model(args.model, dtype=getattr(torch, args.dtype))
    drafter = MedusaDrafter.from_pretrained(args.heads, model)
    rows = run_all(args, model, load_tokenizer(args.model), drafter)
    lines = summary(rows)
    print("\n" + "\n".join(lines))
    if args.save:
        print(f"\nwrote {os.path.relpath(write_results(args, rows, lines))}")
    return 0 if args.dtype != "float32" or all(r.first_difference is None for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
