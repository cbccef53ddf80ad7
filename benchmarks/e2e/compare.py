"""Whole calls of many providers on the same prompts and weights, interleaved for each prompt, with the texts compared.

    python -m benchmarks.e2e.compare --prepare --peer-python vllm=PYTHON llama.cpp=PYTHON economize=PYTHON
    python -m benchmarks.e2e.compare --provider generate plain medusa --dtype float32 --batch-size 4 --prompts FILE
    python -m benchmarks.e2e.compare --provider generate ngram kangaroo --adapter FOLDER --dtype float32 --texts-only

Every provider runs in a process of its own, in its own environment, and is stopped while another one is timed. One that
cannot run, or does not decode the same weights, is left out, and a line says why.

Prompts are JSON lines in the format of Spec-Bench: ``question_id``, ``task``, ``turns`` (the first turn is used).
Every text is compared with that of ``model.generate`` and with that of the same project without speculation. Ours must
always be equal to our own plain decoding in 16 bits on the CPU, and to ``generate`` in fp32. With ``--gaps``, where a
text departs from ``generate``, the gap between the two candidates' logits there is given, in units in the last place of
bf16: zero or a few is a tie that rounding decides.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.e2e import report, sentences
from benchmarks.e2e.catalogue import OURS, PEERS, PROVIDERS
from benchmarks.e2e.processes import WorkerProcess
from benchmarks.e2e.prompts import OWN_PROMPTS, encode, lengthened, read_prompts
from benchmarks.e2e.rows import Row, Run, read_run, without_folders, write_run
from benchmarks.e2e.starting import GATE_PROMPT, started, warm_up
from benchmarks.e2e.weights import MODEL_FOLDER, memory_sizes, write_folder, write_gguf
from benchmarks.harness import RESULTS
from benchmarks.machine import describe_machine
from specdec_kernels.cli import _drafters
from specdec_kernels.hf.load import PACKAGED_MODEL, load_tokenizer

RARE_PROMPTS = 2
# What means nothing on a busy machine.
UNTIMED = ("seconds", "first_token_s", "peak_bytes")


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Return where two texts begin to differ, None when they are equal."""
    differing = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if differing is None and len(a) != len(b) else differing


def compare_batch(
    workers: dict[str, WorkerProcess], prompts: list[list[int]], questions: list[dict], args, absent: dict[str, str]
) -> list[Row]:
    """Decode a batch with every provider, in a new order each time; return a `Row` for each provider and question.

    Who fails goes to ``absent``, with the reason.
    """
    request = {"prompts": prompts, "max_new_tokens": args.max_new_tokens}
    answers = {}
    for name in random.sample(list(workers), len(workers)):
        try:
            answers[name] = workers[name].ask(request)
        except RuntimeError as error:
            absent[name] = f"failed at question {questions[0]['question_id']}: {error}"
            print(f"without {name} from here on: {error}", flush=True)
    texts = {name: answer.pop("texts") for name, answer in answers.items()}
    rows = []
    for name in (name for name in workers if name in answers):
        measured = {**answers[name], **(dict.fromkeys(UNTIMED) if args.texts_only else {})}
        total = sum(map(len, texts[name]))
        standards = {s: texts[s] for s in ("generate", PROVIDERS[name].standard) if s in texts and s != name}
        for index, question in enumerate(questions):
            text = texts[name][index]
            where = {standard: first_difference(text, other[index]) for standard, other in standards.items()}
            about = (question["question_id"], question["task"], name, len(text), total)
            sizes = {"batch_rows": len(questions), "prompt_tokens": len(prompts[index])}
            rows.append(Row(*about, differs_from=where, **sizes, **measured))
    if args.gaps and "generate" in answers:
        _measure_gaps(workers["generate"], prompts, rows, texts)
    return rows


def _measure_gaps(generate: WorkerProcess, prompts: list[list[int]], rows: list[Row], texts: dict) -> None:
    """Fill in ``gap_ulp`` from one more run of ``generate``."""
    found, queries = [], []
    for number, row in enumerate(rows):
        index, at = number % len(prompts), row.differs_from.get("generate")
        theirs, text = texts["generate"][index], texts[row.provider][index]
        if at is not None and at < min(len(text), len(theirs)):
            found.append(row)
            queries.append([index, at, theirs[at], text[at]])
    if queries:
        gaps = generate.ask({"prompts": prompts, "queries": queries})["gaps"]
        for row, gap in zip(found, gaps, strict=True):
            row.gap_ulp = gap


def run_all(args, workers: dict[str, WorkerProcess], tokenizer, questions: list, rows: list[Row], absent: dict):
    """Compare every batch that is not among ``rows``; print a line for each, return all."""
    done, began = {row.question_id for row in rows}, time.monotonic()
    for start in range(0, len(questions), args.batch_size):
        batch = questions[start : start + args.batch_size]
        if all(question["question_id"] in done for question in batch):
            continue
        if args.seconds is not None and time.monotonic() - began > args.seconds:
            print(f"stopped after {args.seconds:g} s; go on with --resume")
            break
        left_out = {*absent, *(args.rarely if start >= RARE_PROMPTS else ())}
        asked = {name: worker for name, worker in workers.items() if name not in left_out}
        new = compare_batch(asked, encode(tokenizer, [q["turns"][0] for q in batch]), batch, args, absent)
        rows = [*rows, *new]
        print(f"{start + len(batch):3}/{len(questions)}  {report.progress(new)}", flush=True)
    return rows


def kept(rows: list[Row], dtype: str) -> bool:
    """Say whether every promise of equality was kept: ours is as ``generate`` in fp32, as our plain one in bf16."""
    standard = "generate" if dtype == "float32" else "plain"
    return all(r.differs_from.get(standard) is None for r in rows if r.provider in OURS)


def result_file(args) -> Path:
    """Return this machine's result file of such a run."""
    parts = ["texts" if args.texts_only else "e2e", *([args.label] if args.label else []), args.dtype]
    folder = RESULTS / describe_machine(torch.device("cpu")).slug
    return folder / f"{'_'.join(parts)}_b{args.batch_size}.jsonl"


def run_head(args, workers: dict[str, WorkerProcess], absent: dict[str, str], sizes: dict[str, int]) -> dict[str, Any]:
    """Return the first line of a result file."""
    return {
        "machine": asdict(describe_machine(torch.device("cpu"))),
        "command": "python -m benchmarks.e2e.compare " + " ".join(map(without_folders, sys.argv[1:])),
        "model": args.model,
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "prepared": args.prepare,
        "shipped": sentences.shipped(),
        **sizes,
        **({} if args.prompt_tokens is None else {"prompt_tokens": args.prompt_tokens}),
        "notes": {name: worker.notes for name, worker in workers.items() if worker.notes},
        "absent": {name: without_folders(reason) for name, reason in absent.items()},
    }


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--limit", type=int, help="use only so many prompts, evenly from every kind of task")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="lengthen every prompt to about N tokens by the "
                        "others of the file, put before it")  # fmt: skip
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--provider",
        nargs="+",
        choices=tuple(PROVIDERS),
        default=list(PROVIDERS),
        metavar="NAME",
        help=f"some of {', '.join(PROVIDERS)} (default: all)",
    )
    parser.add_argument(
        "--rarely", nargs="+", choices=tuple(PROVIDERS), default=[], metavar="NAME",
        help=f"ask these slow ones for the first {RARE_PROMPTS} prompts only",
    )  # fmt: skip
    parser.add_argument("--prepare", action="store_true", help="ours decode with a prepared model")
    parser.add_argument("--model", default=PACKAGED_MODEL)
    _drafters.add_arguments(parser)
    parser.add_argument(
        "--peer-python", nargs="+", default=[], metavar="PEER=PATH", help=f"interpreters of {', '.join(PEERS)}"
    )
    parser.add_argument("--weights", type=Path, help="where `benchmarks.e2e.weights` has written (default: write them)")
    parser.add_argument("--gguf", help="for llama.cpp: a GGUF file of the same weights")
    parser.add_argument("--gaps", action="store_true", help="measure the gap where a text departs from generate")
    parser.add_argument("--texts-only", action="store_true", help="compare texts; times would mean nothing, drop them")
    parser.add_argument("--wait", action="store_true", help="wait for Enter when everything is loaded")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="for what the providers' libraries print")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/e2e_*.jsonl and its SVG")
    parser.add_argument("--label", help="a word for the name of the result file")
    parser.add_argument("--load-seconds", type=float, help="leave out who takes longer to load")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the result file, run the others")
    parser.add_argument("--seconds", type=float, help="begin no batch after so long")
    args = parser.parse_args()
    args.peer_python = dict(item.split("=", 1) for item in args.peer_python)
    return args


def prepare_weights(args, folder: Path) -> Path:
    """Return a folder with the weights of the run, written now unless ``--weights`` names one."""
    if args.weights is not None:
        return args.weights
    dtype = getattr(torch, args.dtype)
    write_folder(args.model, dtype, folder)
    if "llama.cpp" in args.peer_python and not args.gguf:
        write_gguf(args.model, dtype, folder)
    return folder


def special_ids(folder: Path) -> dict[str, Any]:
    """Return the ids that end a text, and the one that fills rows, as ``generate`` knows them."""
    config = GenerationConfig.from_pretrained(folder)
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return {"eos_ids": eos, "pad_id": eos[0] if config.pad_token_id is None else config.pad_token_id}


def main() -> int:
    """Run the comparison named on the command line."""
    args = arguments()
    tokenizer = load_tokenizer(args.model)
    questions = read_prompts(args.prompts, args.limit)
    if args.prompt_tokens is not None:
        questions = lengthened(questions, read_prompts(args.prompts, None), tokenizer, args.prompt_tokens)
    longest = max(len(ids) for q in questions for ids in encode(tokenizer, [q["turns"][0]]))
    random.seed(0)
    with tempfile.TemporaryDirectory() as temporary, args.log.open("a") as log:
        folder = prepare_weights(args, Path(temporary))
        shared = {
            "threads": torch.get_num_threads(),
            "max_length": longest + args.max_new_tokens,
            **special_ids(folder / MODEL_FOLDER),
        }
        with started(args, folder, shared, log) as (workers, absent):
            warm_up(workers, encode(tokenizer, [GATE_PROMPT] * args.batch_size), absent)
            if args.wait:
                input("loaded; Enter starts the run\n")
            rows = read_run(result_file(args)).rows if args.resume and result_file(args).exists() else []
            rows = run_all(args, workers, tokenizer, questions, rows, absent)
            sizes = memory_sizes(folder / MODEL_FOLDER, getattr(torch, args.dtype))
            run = Run(run_head(args, workers, absent, sizes), rows)
    print("\n" + "\n".join(report.table(run)))
    if args.save:
        write_run(result_file(args), run)
        print(f"\nwrote {os.path.relpath(result_file(args))}")
        if not args.texts_only:
            print(f"wrote {os.path.relpath(report.plot(result_file(args)))}")
    return 0 if kept(run.rows, args.dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
