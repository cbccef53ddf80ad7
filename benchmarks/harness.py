"""Run one benchmark file: banner, correctness gate, warm-up, interleaved timing, JSONL, table.

A benchmark file ``bench_<op>.py`` states

- ``CASES``: readable id -> case (any object),
- ``make_inputs(case, device)``: fresh inputs, the same ones at every call,
- ``providers(case)``: name -> function of the inputs that returns the tensors it made or changed; the one called
  ``reference`` is the law, those in ``OURS`` are ours, all others are baselines; one that cannot run raises
  `Unavailable`, and one with a method ``seconds(inputs)`` is timed by that,
- ``cost(case)``: what the op cannot avoid, a `Cost`,
- optionally ``check(actual, expected)``, which raises on a mismatch (default: equal bits),
- optionally ``notes(results, device)``: what else there is to say, printed below the table,
- optionally ``skip(case, device, seconds)``: why a case cannot be run here, or not in that time, or None,
- optionally ``QUICK``: the ids of the cases to run unless all are asked for, and ``draw(jsonl)``: other plots.
"""

import inspect
import json
import math
import random
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .machine import Machine, Roofline, describe_machine, measure_roofline

RESULTS = Path(__file__).parent / "results"
MIN_SAMPLES, MAX_SAMPLES = 10, 2000


@dataclass(frozen=True)
class Cost:
    """Unavoidable work of one call. Reads and writes count against the copy bandwidth once there are writes."""

    read_bytes: int
    write_bytes: int = 0
    flops: int = 0
    dtype: str = "float32"

    def ideal_seconds(self, roofline: Roofline) -> float:
        """Return the time the measured roofline allows."""
        rate = roofline.copy_gb_s if self.write_bytes else roofline.read_gb_s
        memory = (self.read_bytes + self.write_bytes) / (rate * 1e9)
        return max(memory, self.flops / (roofline.matmul_gflop_s[self.dtype] * 1e9))


@dataclass(frozen=True)
class Options:
    """How long and how to measure.

    Attributes:
        seconds: time budget of one provider in one case.
        cold: sweep a large buffer through the caches before each sample.
        peer_python: an interpreter with another project's kernels.
        limit: seconds that a case may take; longer ones are left out.
    """

    seconds: float = 1.0
    cold: bool = False
    peer_python: str | None = None
    limit: float = 60.0


DEFAULTS = Options()


class Unavailable(Exception):
    """A provider cannot run here; the text says why."""


@dataclass(frozen=True)
class Result:
    """One line of the JSONL file."""

    op: str
    case: str
    provider: str
    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    cold: bool
    cost_bytes: int
    cost_flops: int
    roofline_percent: float
    speedup_over_best_baseline: float | None
    machine: dict[str, Any] = field(repr=False)


def find_providers(bench: ModuleType, case: Any, options: Options) -> dict[str, Callable[[Any], list[Tensor]]]:
    """Return the providers of a case; benchmarks of one interpreter know no options."""
    takes_options = len(inspect.signature(bench.providers).parameters) > 1
    return bench.providers(case, options) if takes_options else bench.providers(case)


def gate(bench: ModuleType, case: Any, device: torch.device, options: Options = DEFAULTS) -> dict[str, str]:
    """Refuse to time a case on which the providers disagree. Returns which cannot run, and why."""
    providers = find_providers(bench, case, options)
    expected = providers["reference"](bench.make_inputs(case, device))
    check = getattr(bench, "check", check_equal)
    absent = {}
    for name, run in providers.items():
        try:
            check(run(bench.make_inputs(case, device)), expected)
        except Unavailable as reason:
            absent[name] = str(reason)
        except AssertionError as error:
            raise RuntimeError(f"{bench.OP}: {name} is wrong, nothing is timed: {error}") from error
    return absent


def check_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Require the same shapes and the same bits."""
    for have, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


def time_case(
    bench: ModuleType, case: Any, device: torch.device, options: Options, absent: Container[str] = ()
) -> dict[str, list[float]]:
    """Return the samples in seconds of every provider, taken in turns, in changing order, so that all fare alike."""
    inputs = bench.make_inputs(case, device)
    providers = {name: run for name, run in find_providers(bench, case, options).items() if name not in absent}
    sweep = torch.empty(64 << 20, dtype=torch.float32, device=device) if options.cold else None
    for run in providers.values():
        for _ in range(3):
            run(inputs)
    samples: dict[str, list[float]] = {name: [] for name in providers}
    # One in another process must be woken by a call that is not timed. To be fair, all are then.
    wake = any(hasattr(run, "seconds") for run in providers.values())
    shuffle = random.Random(0)
    deadline = time.perf_counter() + options.seconds * len(providers)
    while len(samples["reference"]) < MIN_SAMPLES or (
        time.perf_counter() < deadline and len(samples["reference"]) < MAX_SAMPLES
    ):
        for name in shuffle.sample(list(providers), len(providers)):
            if wake and not hasattr(providers[name], "seconds"):
                providers[name](inputs)
            if sweep is not None:
                sweep.add_(1)
            samples[name].append(seconds(providers[name], inputs, device))
    return samples


def seconds(run: Callable[[Any], Any], inputs: Any, device: torch.device) -> float:
    """Time one call."""
    if hasattr(run, "seconds"):
        return run.seconds(inputs)
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(inputs)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    run(inputs)
    return time.perf_counter() - begin


def quantile(samples: list[float], share: float) -> float:
    """Return a sample: the smallest that at least ``share`` of the samples do not exceed."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def summarise(
    bench: ModuleType, case_id: str, samples: dict[str, list[float]], machine: Machine, roofline: Roofline, cold: bool
) -> list[Result]:
    """Turn samples into results, with speed-ups over the fastest baseline."""
    cost = bench.cost(bench.CASES[case_id])
    baselines = [name for name in samples if name not in bench.OURS and name != "reference"]
    best = min((quantile(samples[name], 0.5) for name in baselines), default=None)
    results = []
    for name, times in samples.items():
        median = quantile(times, 0.5)
        results.append(
            Result(
                op=bench.OP,
                case=case_id,
                provider=name,
                median_us=round(median * 1e6, 3),
                p20_us=round(quantile(times, 0.2) * 1e6, 3),
                p80_us=round(quantile(times, 0.8) * 1e6, 3),
                samples=len(times),
                cold=cold,
                cost_bytes=cost.read_bytes + cost.write_bytes,
                cost_flops=cost.flops,
                roofline_percent=round(100 * cost.ideal_seconds(roofline) / median, 2),
                speedup_over_best_baseline=None if best is None else round(best / median, 3),
                machine={**asdict(machine), **asdict(roofline)},
            )
        )
    return results


def table(results: list[Result]) -> str:
    """Format results for a terminal."""
    rows = [("case", "provider", "median µs", "p20", "p80", "% roofline", "vs best baseline")]
    for r in results:
        speedup = "" if r.speedup_over_best_baseline is None else f"{r.speedup_over_best_baseline:.2f}x"
        times = (f"{r.median_us:.1f}", f"{r.p20_us:.1f}", f"{r.p80_us:.1f}")
        rows.append((r.case, r.provider, *times, f"{r.roofline_percent:.1f}", speedup))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{c:{'<' if i < 2 else '>'}{widths[i]}}" for i, c in enumerate(row)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def run_benchmark(
    bench: ModuleType, device: torch.device, options: Options, case_ids: Iterable[str]
) -> tuple[Machine, list[Result], bool]:
    """Run the cases of one benchmark file, printing as it goes.

    Returns:
        The machine, what was measured, and whether an interruption stopped it.
    """
    machine, roofline = describe_machine(device), measure_roofline(device)
    print(machine.banner())
    print(roofline.banner())
    results: list[Result] = []
    told: set[tuple[str, str]] = set()
    try:
        for case_id in case_ids:
            results += _run_case(bench, case_id, device, options, machine, roofline, told)
    except KeyboardInterrupt:
        print(f"{bench.OP}: stopped", flush=True)
        return machine, results, True
    return machine, results, False


def _run_case(
    bench: ModuleType,
    case_id: str,
    device: torch.device,
    options: Options,
    machine: Machine,
    roofline: Roofline,
    told: set[tuple[str, str]],
) -> list[Result]:
    """Check and time one case; ``told`` are the absent providers and reasons that were printed already."""
    case = bench.CASES[case_id]
    reason = bench.skip(case, device, options.limit) if hasattr(bench, "skip") else None
    if reason:
        print(f"{bench.OP} {case_id}: skipped, {reason}")
        return []
    absent = gate(bench, case, device, options)
    for name, why in absent.items():
        if (name, why) not in told:
            print(f"{bench.OP} {name}: cannot run, {why}")
    told |= set(absent.items())
    samples = time_case(bench, case, device, options, absent)
    print(f"{bench.OP} {case_id}: correct, timed", flush=True)
    return summarise(bench, case_id, samples, machine, roofline, options.cold)


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a result file: a line of JSON for each record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def save(name: str, machine: Machine, results: list[Result], add: bool = False) -> Path:
    """Write ``results/<device>/<name>.jsonl``, replacing what earlier runs measured; ``add``: of these cases only."""
    path = RESULTS / machine.slug / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {result.case for result in results}
    kept = path.read_text().splitlines(keepends=True) if add and path.exists() else []
    kept = [line for line in kept if json.loads(line)["case"] not in measured]
    path.write_text("".join(kept) + "".join(json.dumps(asdict(result)) + "\n" for result in results))
    return path
