"""``specdec-kernels bench``: run a microbenchmark of a clone on this machine."""

import fnmatch
import importlib
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from ._arguments import device, positive_int

REPOSITORY = Path(__file__).parents[2]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare which benchmark to run and how."""
    names = benchmark_names()
    parser.add_argument("op", metavar="OP", nargs="?", help=f"one of: {', '.join(names) or 'none found'}; default: all")
    parser.add_argument(
        "--case", action="append", metavar="PATTERN", help="only cases like this, e.g. 'llama3*'; may be given often"
    )
    parser.add_argument("--device", type=device, default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=positive_int, help="threads of the CPU kernels; default: torch's choice")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each provider of each case")
    parser.add_argument("--cold", action="store_true", help="sweep the caches before each sample")
    parser.add_argument("--full", action="store_true", help="all cases of a benchmark that has a quick subset")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="interpreter with another project's kernels, as a baseline"
    )
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="leave out cases that take longer")
    parser.add_argument("--list", action="store_true", help="list benchmarks and cases, and stop")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/<op>.jsonl and .svg")
    parser.add_argument("--name", help="name of the files that --save writes; default: the op's")
    parser.add_argument("--add", action="store_true", help="with --save: keep what the file has of other cases")


def benchmark_names() -> list[str]:
    """Return the stems of the benchmark files of this clone; none when the package was installed without them."""
    return sorted(path.stem.removeprefix("bench_") for path in (REPOSITORY / "benchmarks").glob("bench_*.py"))


def run(args: Namespace) -> int:
    """Run one benchmark, or all; return the exit code.

    Raises:
        KeyboardInterrupt: again, when what was measured until then is printed and saved.
    """
    names = benchmark_names()
    if not names:
        print("specdec-kernels bench runs from a clone of the repository: no benchmarks folder here", file=sys.stderr)
        return 2
    if args.op is not None and args.op not in names:
        print(f"there is no benchmark {args.op!r}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
    sys.path.insert(0, str(REPOSITORY))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as on ctrl-C, what was measured is kept
    return max(_run_one(name, args) for name in ([args.op] if args.op else names))


def _run_one(name: str, args: Namespace) -> int:
    bench = importlib.import_module(f"benchmarks.bench_{name}")
    harness = importlib.import_module("benchmarks.harness")
    known = bench.CASES if args.full else getattr(bench, "QUICK", bench.CASES)
    patterns = args.case or ["*"]
    case_ids = [case_id for case_id in known if any(fnmatch.fnmatch(case_id, pattern) for pattern in patterns)]
    if args.list:
        print("\n".join(f"{name} {case_id}" for case_id in case_ids))
        return 0
    if not case_ids:
        print(f"{name} has no case like {' or '.join(map(repr, patterns))}; see --list", file=sys.stderr)
        return 2
    options = harness.Options(args.seconds, args.cold, args.peer_python, args.limit)
    machine, results, stopped = harness.run_benchmark(bench, args.device, options, case_ids)
    if results or not stopped:
        print(harness.table(results))
    if args.save and results:
        path = harness.save(args.name or name, machine, results, args.add)
        draw = getattr(bench, "draw", None) or importlib.import_module("benchmarks.plot").plot
        drawn = draw(path)
        print("written:", *[path, *(drawn if isinstance(drawn, list) else [drawn])], flush=True)
    if stopped:
        raise KeyboardInterrupt
    if hasattr(bench, "notes"):
        print(bench.notes(results, args.device))
    return 0
