"""The same benchmarks under pytest-benchmark: ``pytest benchmarks --benchmark-only``."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from .harness import gate

pytest.importorskip("pytest_benchmark")

BENCHES = [
    importlib.import_module(f".{path.stem}", __package__) for path in sorted(Path(__file__).parent.glob("bench_*.py"))
]
RUNS = [
    pytest.param(bench, case_id, provider, id=f"{bench.OP}-{case_id}-{provider}")
    for bench in BENCHES
    for case_id, case in bench.CASES.items()
    if case_id in getattr(bench, "QUICK", bench.CASES)
    for provider in bench.providers(case)
]


@pytest.mark.parametrize(("bench", "case_id", "provider"), RUNS)
def test_provider(bench: ModuleType, case_id: str, provider: str, benchmark) -> None:
    case, device = bench.CASES[case_id], torch.device("cpu")
    absent = gate(bench, case, device)
    if provider in absent:
        pytest.skip(absent[provider])
    inputs = bench.make_inputs(case, device)
    benchmark.group = f"{bench.OP} {case_id}"
    benchmark(bench.providers(case)[provider], inputs)
