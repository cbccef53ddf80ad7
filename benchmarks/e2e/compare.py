"""Whole calls of plain and speculative decoding on the same prompts, interleaved, with the texts compared.

    python -m benchmarks.e2e.compare --dtype bfloat16 --batch-size 1
    python -m benchmarks.e2e.compare --dtype float32 --batch-size 4 --prompts FILE
    python -m benchmarks.e2e.compare --drafter plain medusa --without-generate
    python -m benchmarks.e2e.compare --drafter plain medusa --prepare

Prompts are JSON lines in the format of Spec-Bench: ``question_id``, ``task``, ``turns`` (the first turn is used).
Every text is compared with that of ``model.generate`` and, when ``plain`` is among the drafters, with that of our own
plain decoding. The second must always be equal in 16 bits on the CPU, the first in fp32. Where a text departs from
``generate`` in bf16, the gap between the two candidates' logits there is given, in units in the last place of bf16:
zero or a few is a tie that rounding decides.
"""

import argparse
import copy
import json
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.e2e.providers import OURS, THEIRS, Provider, provider
from benchmarks.harness import RESULTS
from benchmarks.machine import describe_machine
from specdec_kernels.cli import _drafters
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model, load_tokenizer
from specdec_kernels.hf.prepare import prepare

OWN_PROMPTS = Path(__file__).parent / "prompts.jsonl"
# A plain run whose two candidates lie this close, in bf16 units in the last place, is decided by rounding.
NEAR_TIE_ULP = 4.0
# What the texts are compared with, where it takes part in the run.
STANDARDS = ("generate", "plain")


@dataclass
class Row:
    """One prompt under one provider; ``seconds`` and ``batch_tokens`` are those of its batch.

    ``differs_from`` holds, for each of `STANDARDS` in the run, where the text first differs, None when it is equal.
    """

    question_id: int
    task: str
    drafter: str
    new_tokens: int
    batch_tokens: int
    seconds: float
    tokens_per_step: float | None
    differs_from: dict[str, int | None]
    gap_ulp: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """New tokens of the batch over its time."""
        return self.batch_tokens / self.seconds


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


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Return where two rows begin to differ, None when they are equal; both are padded alike after their end."""
    differing = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if differing is None and len(a) != len(b) else differing


def bf16_gap(model, inputs: dict, position: int, row: int, ids: tuple[int, int], options: dict) -> float:
    """Return how far apart ``generate``'s logits of two tokens are at a position, in bf16 ulp of the greater one."""
    options = {**options, "max_new_tokens": position + 1}
    plain = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    ours, theirs = (float(plain.logits[position][row, i]) for i in ids)
    ulp = 2.0 ** (math.floor(math.log2(max(abs(ours), abs(theirs), 1e-30))) - 7)
    return abs(ours - theirs) / ulp


def compare_batch(model, providers: dict[str, Provider], inputs: dict, questions: list[dict], options: dict):
    """Decode a batch with every provider, in a new order each time; return a `Row` for each provider and question."""
    prompt_len = inputs["input_ids"].shape[1]
    decoded, seconds = {}, {}
    for name in random.sample(list(providers), len(providers)):
        start = time.perf_counter()
        decoded[name] = providers[name](inputs, options)
        seconds[name] = time.perf_counter() - start
    texts = {name: result.ids[:, prompt_len:].tolist() for name, result in decoded.items()}
    rows = []
    for name in providers:
        lengths = [length_of(text, model) for text in texts[name]]
        stats = decoded[name].stats
        for index, question in enumerate(questions):
            text = texts[name][index]
            standards = {standard: texts[standard][index] for standard in STANDARDS if standard in texts}
            where = {key: first_difference(text, other) for key, other in standards.items() if key != name}
            row = Row(
                *(question["question_id"], question["task"], name, lengths[index], sum(lengths), seconds[name]),
                *(None if stats is None else stats.tokens_per_step, where),
            )
            at = where.get("generate")
            if at is not None and at < min(len(text), len(standards["generate"])):
                row.gap_ulp = bf16_gap(model, inputs, at, index, (standards["generate"][at], text[at]), options)
            rows.append(row)
    return rows


def length_of(text: list[int], model) -> int:
    """Return how many tokens a row has, its EOS included."""
    eos = model.generation_config.eos_token_id
    ids = eos if isinstance(eos, list) else [eos]
    return next((i + 1 for i, token in enumerate(text) if token in ids), len(text))


def run_all(args, model, tokenizer) -> list[Row]:
    """Compare every batch; print a line for each."""
    questions = read_prompts(args.prompts, args.limit)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    names = args.drafter if args.without_generate else ["generate", *args.drafter]
    fast = prepare(copy.deepcopy(model)) if args.prepare else model
    providers = {name: provider(name, fast if name in OURS else model, args) for name in names}
    random.seed(0)
    warm_up = [{"question_id": 0, "task": "warm-up"}] * args.batch_size
    compare_batch(model, providers, encode(tokenizer, ["Hello"] * args.batch_size), warm_up, options)
    rows = read_rows(args) if args.resume else []
    done, started = {row.question_id for row in rows}, time.monotonic()
    for start in range(0, len(questions), args.batch_size):
        batch = questions[start : start + args.batch_size]
        if all(question["question_id"] in done for question in batch):
            continue
        if args.seconds is not None and time.monotonic() - started > args.seconds:
            print(f"stopped after {args.seconds:g} s; go on with --resume")
            break
        inputs = encode(tokenizer, [q["turns"][0] for q in batch])
        new = compare_batch(model, providers, inputs, batch, options)
        rows += new
        shown = [f"{name} {next(r for r in new if r.drafter == name).tokens_per_s:.1f}" for name in providers]
        differing = [
            f"{r.drafter}≠{standard} {r.question_id}@{at}"
            for r in new
            for standard, at in r.differs_from.items()
            if at is not None
        ]
        print(
            f"{start + len(batch):3}/{len(questions)}  tokens/s: {', '.join(shown)}  "
            + (", ".join(differing) or "all equal"),
            flush=True,
        )
    return rows


def summary(rows: list[Row]) -> list[str]:
    """Return a table for each provider by task, and the verdict on equality."""
    speeds = {(r.question_id, r.drafter): r.tokens_per_s for r in rows}
    lines = [f"{'drafter':<16}{'task':<16}{'tok/s':>8}{'speed-up':>10}{'tok/step':>10}  identical to"]
    for name in dict.fromkeys(r.drafter for r in rows):
        tasks = defaultdict(list)
        for row in (r for r in rows if r.drafter == name):
            tasks[row.task].append(row)
            tasks["all"].append(row)
        tasks["all"] = tasks.pop("all")  # last
        lines += [_line(name, task, group, speeds) for task, group in tasks.items()]
    gaps = [r.gap_ulp for r in rows if r.gap_ulp is not None]
    if gaps:
        near = sum(gap <= NEAR_TIE_ULP for gap in gaps)
        lines.append(
            f"first differences from generate: {len(gaps)}; {near} are near-ties of its run (<= {NEAR_TIE_ULP:g} bf16 "
            f"ulp); gaps: median {statistics.median(gaps):.1f}, largest {max(gaps):.1f} ulp"
        )
    return lines


def _line(name: str, task: str, group: list[Row], speeds: dict[tuple[int, str], float]) -> str:
    baseline = [speeds.get((r.question_id, "generate")) for r in group]
    ratios = [r.tokens_per_s / speed for r, speed in zip(group, baseline, strict=True) if speed]
    steps = [r.tokens_per_step for r in group if r.tokens_per_step is not None]
    same = [
        f"{standard} {sum(r.differs_from[standard] is None for r in group)} of {len(group)}"
        for standard in group[0].differs_from
    ]
    return (
        f"{name:<16}{task:<16}{geometric([r.tokens_per_s for r in group]):>8.1f}"
        + (f"{geometric(ratios):>9.2f}x" if ratios else f"{'-':>10}")
        + (f"{statistics.mean(steps):>10.2f}" if steps else f"{'-':>10}")
        + f"  {', '.join(same)}"
    )


def geometric(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.mean(math.log(v) for v in values))


def result_file(args) -> Path:
    """Return this machine's result file of such a run."""
    folder = RESULTS / describe_machine(torch.device("cpu")).slug
    names = "_".join([*args.drafter, *(["prepared"] if args.prepare else [])])
    return folder / f"e2e_{names}_{args.dtype}_b{args.batch_size}.jsonl"


def read_rows(args) -> list[Row]:
    """Return the rows of the result file, none when it is not there."""
    path = result_file(args)
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [Row(**record) for record in records if "question_id" in record]


def write_results(args, rows: list[Row], lines: list[str]) -> Path:
    """Write the machine, the command, the rows and the summary to this machine's result file."""
    machine, path = describe_machine(torch.device("cpu")), result_file(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Paths are this machine's own; a file name says which prompts and heads were used.
    command = "python -m benchmarks.e2e.compare " + " ".join(Path(a).name if "/" in a else a for a in sys.argv[1:])
    head = {"machine": asdict(machine), "command": command}
    records = [head, *(asdict(row) for row in rows), {"summary": lines}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def kept(rows: list[Row], dtype: str) -> bool:
    """Say whether every promise of equality was kept: ours is as ``generate`` in fp32, as our plain one in bf16."""
    standard = "generate" if dtype == "float32" else "plain"
    return all(r.differs_from.get(standard) is None for r in rows if r.drafter in OURS)


def main() -> int:
    """Run the comparison named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--limit", type=int, help="use only the first prompts")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--drafter",
        nargs="+",
        choices=(*OURS, *THEIRS),
        default=["medusa"],
        metavar="NAME",
        help=f"one or more of {', '.join((*OURS, *THEIRS))}",
    )
    parser.add_argument("--without-generate", action="store_true", help="only our own plain decoding as a standard")
    parser.add_argument("--prepare", action="store_true", help="ours decode with a prepared copy of the model")
    parser.add_argument("--model", default=PACKAGED_MODEL)
    _drafters.add_arguments(parser)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/e2e_*.jsonl")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the result file, run the others")
    parser.add_argument("--seconds", type=float, help="begin no batch after so long")
    args = parser.parse_args()
    for name in set(args.drafter) & set(OURS):
        _drafters.check(name, args)
    model = load_model(args.model, dtype=getattr(torch, args.dtype))
    rows = run_all(args, model, load_tokenizer(args.model))
    lines = summary(rows)
    print("\n" + "\n".join(lines))
    if args.save:
        print(f"\nwrote {os.path.relpath(write_results(args, rows, lines))}")
    return 0 if kept(rows, args.dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
