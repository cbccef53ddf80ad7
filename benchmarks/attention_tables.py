"""The tables of the documentation out of a result file of `benchmarks.bench_tree_attention`."""

import json
import re
from collections import defaultdict
from pathlib import Path

PEER, OURS = "extend_attention_cpu", "specdec_kernels"
GRID = re.compile(r"llama3_8b-B1-P(?P<prefix>\d+)-T(?P<nodes>\d+)-(?P<dtype>bfloat16|float32)")
PREFIXES, GROWTH_NODES = (512, 4096, 16384), (1, 26)


class Timed:
    """What was measured of one case: medians in microseconds by provider."""

    def __init__(self, records: list[dict]) -> None:
        self.us = {record["provider"]: record["median_us"] for record in records}
        self.roofline_percent = next(r["roofline_percent"] for r in records if r["provider"] == OURS)

    @property
    def ours(self) -> str:
        return f"{self.us[OURS]:.0f}"

    @property
    def over_torch(self) -> str:
        """Return how many times as long as ours torch's best form takes."""
        return f"{min(us for name, us in self.us.items() if name.startswith('sdpa')) / self.us[OURS]:.1f} ×"

    @property
    def over_peer(self) -> str:
        return f"{self.us[PEER] / self.us[OURS]:.1f} ×" if PEER in self.us else "-"


def read(path: Path) -> dict[str, Timed]:
    """Return the cases of a result file."""
    records = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        records[record["case"]].append(record)
    return {case: Timed(of_case) for case, of_case in records.items()}


def _grid(path: Path) -> dict[tuple[int, int, str], Timed]:
    matches = ((GRID.fullmatch(case), timed) for case, timed in read(path).items())
    return {(int(m["prefix"]), int(m["nodes"]), m["dtype"]): timed for m, timed in matches if m}


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def grid(path: Path) -> list[str]:
    """Return the table of Llama-3-8B, one sequence, in both dtypes."""
    timed = _grid(path)
    rows = []
    for prefix, nodes, dtype in sorted(timed):
        if prefix in PREFIXES and dtype == "bfloat16":
            half, single = timed[prefix, nodes, dtype], timed.get((prefix, nodes, "float32"))
            row = [half.ours, f"{half.roofline_percent:.0f}", half.over_torch, half.over_peer]
            row += ["-", "-"] if single is None else [single.ours, single.over_torch]
            rows.append([str(prefix), str(nodes), *row])
    return _table(["P", "T", "bf16 µs", "% of roofline", "torch", "peer", "fp32 µs", "torch"], rows)


def others(path: Path) -> list[str]:
    """Return the table of the other cases: a prompt, a batch, other models."""
    rows = [
        [case, timed.ours, f"{timed.roofline_percent:.0f}", timed.over_torch, timed.over_peer]
        for case, timed in read(path).items()
        if not GRID.fullmatch(case)
    ]
    return _table(["", "µs", "% of roofline", "torch", "peer"], rows)


def growth(path: Path) -> list[str]:
    """Return our time for each number of keys, and for one key."""
    timed = {key: value for key, value in _grid(path).items() if key[2] == "bfloat16" and key[1] in GROWTH_NODES}
    prefixes = sorted({prefix for prefix, _, _ in timed})
    rows = []
    for nodes in GROWTH_NODES:
        us = [timed[prefix, nodes, "bfloat16"].us[OURS] for prefix in prefixes]
        rows.append([f"T = {nodes}: µs", *(f"{t:.0f}" for t in us)])
        rows.append(["ns per key", *(f"{1e3 * t / prefix:.0f}" for t, prefix in zip(us, prefixes, strict=True))])
    return _table(["P", *map(str, prefixes)], rows)


def overhead(path: Path) -> list[str]:
    """Return the table of a result file of `benchmarks.launch_overhead`."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return _table(["call", "µs"], [[record["call"], f"{record['median_us']:.0f}"] for record in records])


def summary(path: Path) -> list[str]:
    """Return a sentence on P = 4096."""
    one, some, many = (_grid(path)[4096, nodes, "bfloat16"] for nodes in (1, 26, 64))
    shares = sorted(timed.roofline_percent for timed in (one, some, many))
    ms = [timed.us[OURS] / 1e3 for timed in (one, some, many)]
    return [
        f"Tree attention of one Llama-3-8B layer in bf16 over 4096 tokens takes {ms[0]:.2f} ms for one node, "
        f"{ms[1]:.1f} ms for 26 and {ms[2]:.1f} ms for 64 on",
        f"two threads: {one.over_torch}, {some.over_torch} and {many.over_torch} faster than torch's best form, "
        f"{shares[0]:.0f} to {shares[-1]:.0f} % of what the machine's measured bandwidth and matmul rate",
        "allow (`tree_attention.jsonl`; [docs/tree_attention.md](docs/tree_attention.md) has all prefixes, and the "
        "memory).",
    ]
