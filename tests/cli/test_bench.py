"""``specdec-kernels bench`` and the harness it drives."""

import importlib.util
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    bench_decoder,
    bench_kv_compact,
    bench_layers,
    bench_linear,
    bench_medusa_project,
    bench_tree_attention,
    bench_verify,
    harness,
)
from benchmarks.bench_kv_compact import Case
from benchmarks.machine import Machine, Roofline
from benchmarks.memory import peak_extra_bytes
from benchmarks.peer import PeerProcess
from specdec_kernels import _native
from specdec_kernels.cli import bench as command
from specdec_kernels.cli.__main__ import main

CPU = torch.device("cpu")
MACHINE = Machine("cpu", "Some CPU @ 2.0 GHz", 2, "avx2", 1, "2.13", "0.1")
ROOFLINE = Roofline(read_gb_s=10, copy_gb_s=8, matmul_gflop_s={"float32": 100.0, "bfloat16": 100.0})


def toy_bench(**changes) -> SimpleNamespace:
    """A benchmark that doubles a tensor."""
    providers = {
        "reference": lambda inputs: [inputs + inputs],
        "ours": lambda inputs: [inputs * 2],
        "slow": lambda inputs: [torch.stack([inputs, inputs]).sum(0)],
    }
    members = {
        "OP": "toy",
        "OURS": ("ours",),
        "CASES": {"n8": 8},
        "make_inputs": lambda case, device: torch.arange(case, device=device),
        "providers": lambda case: providers,
        "cost": lambda case: harness.Cost(read_bytes=8 * case, write_bytes=8 * case, flops=case),
    }
    return SimpleNamespace(**{**members, **changes})


def test_gate_refuses_a_wrong_provider() -> None:
    harness.gate(toy_bench(), 8, CPU)
    wrong = {"reference": lambda inputs: [inputs], "ours": lambda inputs: [inputs + (inputs == 7)]}
    with pytest.raises(RuntimeError, match="toy: ours is wrong, nothing is timed"):
        harness.gate(toy_bench(providers=lambda case: wrong), 8, CPU)


def unavailable(_inputs) -> list[torch.Tensor]:
    raise harness.Unavailable("made for another machine")


def test_a_provider_that_cannot_run_is_told_and_left_out(capsys, monkeypatch) -> None:
    monkeypatch.setattr(harness, "measure_roofline", lambda device: ROOFLINE)
    providers = {**toy_bench().providers(8), "alien": unavailable}
    bench = toy_bench(
        CASES={"n8": 8, "n9": 9, "n7": 7},
        providers=lambda case: providers,
        skip=lambda case, device, seconds: "9 is too many" if case == 9 else None,
    )
    _, results, stopped = harness.run_benchmark(bench, CPU, harness.Options(seconds=0.0), bench.CASES)
    assert not stopped
    assert {r.provider for r in results} == {"reference", "ours", "slow"}
    assert {r.case for r in results} == {"n8", "n7"}
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("toy alien: cannot run, made for another machine") == 1
    assert "toy n9: skipped, 9 is too many" in lines


def interrupted(inputs: torch.Tensor) -> list[torch.Tensor]:
    if len(inputs) == 9:
        raise KeyboardInterrupt
    return [inputs * 2]


def test_an_interruption_ends_the_command_and_keeps_what_was_measured(tmp_path, capsys, monkeypatch) -> None:
    """In the second case of the first of two ops: nothing is asked of the second, and nothing more of the first."""
    monkeypatch.setattr(harness, "measure_roofline", lambda device: ROOFLINE)
    monkeypatch.setattr(harness, "describe_machine", lambda device: MACHINE)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "benchmark_names", lambda: ["first", "second"])
    cases = {"n8": 8, "n9": 9, "n7": 7}
    changes = {"notes": unavailable, "draw": lambda path: path}
    first = toy_bench(CASES=cases, providers=lambda case: {"reference": interrupted}, **changes)
    monkeypatch.setitem(sys.modules, "benchmarks.bench_first", first)
    monkeypatch.setitem(sys.modules, "benchmarks.bench_second", None)  # its import would fail
    assert main(["bench", "--seconds", "0", "--save"]) == 130
    said = capsys.readouterr()
    assert "toy: stopped\n" in said.out
    assert said.err == "specdec-kernels bench: stopped\n"
    (saved,) = tmp_path.rglob("*.jsonl")
    assert {json.loads(line)["case"] for line in saved.read_text().splitlines()} == {"n8"}


class Remote:
    """A provider that is timed elsewhere."""

    def __call__(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        return [inputs * 2]

    def seconds(self, inputs: torch.Tensor) -> float:
        return 7.0


def test_a_provider_may_time_itself() -> None:
    providers = {**toy_bench().providers(8), "remote": Remote()}
    samples = harness.time_case(toy_bench(providers=lambda case: providers), 8, CPU, harness.Options(seconds=0.0))
    assert set(samples["remote"]) == {7.0}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="here the peer can run")
def test_the_peer_says_why_it_cannot_run() -> None:
    with pytest.raises(RuntimeError, match="vllm is not installed there"):
        PeerProcess(sys.executable)


def test_summary_compares_with_the_best_baseline() -> None:
    samples = {"reference": [9.0] * 5, "ours": [1e-9, 2e-9, 3e-9, 4e-9, 5e-9], "slow": [6e-9] * 5, "slower": [9e-9] * 5}
    results = {r.provider: r for r in harness.summarise(toy_bench(), "n8", samples, MACHINE, ROOFLINE, False)}
    ours = results["ours"]
    assert (ours.p20_us, ours.median_us, ours.p80_us) == (0.001, 0.003, 0.004)
    assert ours.speedup_over_best_baseline == 2.0
    assert results["slower"].speedup_over_best_baseline == 0.667
    # 128 bytes at 8 GB/s take 16 ns; 8 flops at 100 Gflop/s far less.
    assert ours.roofline_percent == pytest.approx(100 * 16 / 3, abs=0.01)
    text = harness.table(list(results.values()))
    assert "2.00x" in text
    assert len({len(line) for line in text.splitlines()}) == 1


def test_cost_without_writes_counts_against_reading() -> None:
    assert harness.Cost(read_bytes=100).ideal_seconds(ROOFLINE) == pytest.approx(1e-8)
    assert harness.Cost(read_bytes=1, flops=1000).ideal_seconds(ROOFLINE) == pytest.approx(1e-8)


def test_every_provider_gets_the_same_number_of_samples() -> None:
    samples = harness.time_case(toy_bench(), 8, CPU, harness.Options(seconds=0.0))
    assert {len(times) for times in samples.values()} == {harness.MIN_SAMPLES}
    assert min(min(times) for times in samples.values()) > 0


def test_results_are_written_and_drawn(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import plot

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    results = harness.summarise(toy_bench(), "n8", {"reference": [2e-6], "ours": [1e-6]}, MACHINE, ROOFLINE, True)
    path = harness.save("toy", MACHINE, results)
    assert path == tmp_path / "some-cpu-2-0-ghz" / "toy.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["provider"] for r in records] == ["reference", "ours"]
    assert records[0]["machine"]["model"] == "Some CPU @ 2.0 GHz"
    assert plot(path).read_text().lstrip().startswith("<?xml")


def test_results_of_other_cases_are_kept_when_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    bench = toy_bench(CASES={"n8": 8, "n9": 9})

    def saved(case_id, median, add) -> list[tuple[str, float]]:
        results = harness.summarise(bench, case_id, {"reference": [median * 1e-6]}, MACHINE, ROOFLINE, False)
        path = harness.save("toy", MACHINE, results, add)
        return [(r["case"], r["median_us"]) for r in map(json.loads, path.read_text().splitlines())]

    saved("n8", 1.0, add=True)
    assert saved("n9", 2.0, add=True) == [("n8", 1.0), ("n9", 2.0)]
    assert saved("n8", 3.0, add=True) == [("n9", 2.0), ("n8", 3.0)]
    assert saved("n8", 4.0, add=False) == [("n8", 4.0)]


def test_speedups_are_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    results = [
        harness.Result("toy", f"{model}-B1-P{x}-T{nodes}-bfloat16", name, 1, 1, 1, 1, False, 1, 1, 1.0, x / 100, {})
        for model, x, nodes in product(("one", "two"), (128, 1024), (1, 8))
        for name in ("specdec_kernels", "other")
    ]
    path = tmp_path / "tree_attention_grid.jsonl"
    path.write_text("".join(json.dumps({**asdict(r), "machine": asdict(MACHINE)}) + "\n" for r in results))
    (drawn,) = bench_tree_attention.draw(path)
    text = drawn.read_text()
    assert all(word in text for word in ("<!-- one -->", "<!-- two -->", "<!-- batch 1, nodes 8 -->"))


@pytest.mark.parametrize("layout", ["list", "stacked", "paged"])
def test_kv_compact_providers_agree(layout) -> None:
    case = Case("smollm2_135m", 2, 3, 4, layout, capacity=64, prefix=40)
    harness.gate(bench_kv_compact, case, CPU)
    assert bench_kv_compact.cost(case).read_bytes == 2 * 30 * 2 * 3 * (3 * 64 * 2)


def test_verification_is_timed_against_the_same_decisions() -> None:
    for num_accepted in (2, 3):
        case = bench_verify.Case(1000, 3, num_accepted)
        harness.gate(bench_verify, case, CPU)
        assert bench_verify.cost(case).read_bytes == 4000 * (3 + 3 if num_accepted == 2 else 4 + 3)


def test_verification_notes(monkeypatch) -> None:
    monkeypatch.setattr(bench_verify, "CASES", {"toy": bench_verify.Case(1000, 3, 3)})
    samples = {"reference": [9e-6], "specdec_kernels": [2e-6], "composite": [5e-6], "read_once": [1e-6]}
    text = bench_verify.notes(harness.summarise(bench_verify, "toy", samples, MACHINE, ROOFLINE, False), CPU)
    assert "2.5 times as fast" in text
    assert "2.0 times one reading" in text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell peak memory")
def test_peak_memory() -> None:
    """The logits are 26 MB, and the composite has their softmax. Elsewhere a megabyte or two may come and go."""
    inputs = bench_verify.make_inputs(case := bench_verify.Case(128_256, 25, 25), CPU)
    runs = bench_verify.providers(case)
    extra = {}
    for name in ("specdec_kernels", "composite"):
        runs[name](inputs)
        extra[name] = peak_extra_bytes(lambda run=runs[name]: run(inputs), CPU)
    assert extra["composite"] > 20 << 20
    if _native.load_errors["_C"] is None:
        assert extra["specdec_kernels"] < 2 << 20


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_medusa_project_providers_agree(own) -> None:
    case = bench_medusa_project.Case("smollm2_135m", 2, own, num_rows=300)
    harness.gate(bench_medusa_project, case, CPU)
    assert bench_medusa_project.cost(case).read_bytes == 2 * 576 * (4 * 576 + (4 if own else 1) * 300)


def test_linear_providers_agree() -> None:
    case = bench_linear.Case("smollm2_135m", 3)
    harness.gate(bench_linear, case, CPU)
    assert bench_linear.cost(case).read_bytes == 2 * 576 * (576 + 2 * 192 + 576 + 3 * 1536)
    results = harness.summarise(
        SimpleNamespace(**vars(bench_linear) | {"CASES": {"toy": case}}),
        *("toy", {"reference": [9e-6], "specdec_kernels": [2e-6], "torch": [5e-6]}, MACHINE, ROOFLINE, False),
    )
    assert "2.50 times as fast" in bench_linear.notes(results, CPU)


def test_decoder_providers_agree() -> None:
    case = bench_decoder.Case("smollm2_135m", 2, 3)
    harness.gate(bench_decoder, case, CPU)
    assert bench_decoder.cost(case).read_bytes == 2 * 6 * (2 * 576 + 15 * 64)


def test_layers_providers_agree() -> None:
    case = bench_layers.Case("smollm2_135m", 2, 3, layers=2)
    harness.gate(bench_layers, case, CPU)
    assert bench_layers.cost(case).read_bytes == 4 * (576 * (576 + 2 * 192 + 576 + 3 * 1536) + 2 * 2 * 512 * 192)
    results = harness.summarise(
        SimpleNamespace(**vars(bench_layers) | {"CASES": {"toy": case}}),
        *("toy", {"reference": [9e-6], "specdec_kernels": [4e-6], "one_by_one": [8e-6]}, MACHINE, ROOFLINE, False),
    )
    assert "1.0 µs a layer,      2.0 op by op" in bench_layers.notes(results, CPU)


def test_lists_cases(capsys) -> None:
    assert main(["bench", "kv_compact", "--list", "--case", "smollm2*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "kv_compact smollm2_135m-B1-N4-list" in lines
    assert all("smollm2" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["bench", "nothing"], "no benchmark 'nothing'"), (["bench", "kv_compact", "--case", "x"], "no case like 'x'")],
)
def test_refuses_unknown_names(arguments, message, capsys) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--threads", "-3", "at least 1, got -3"),
        ("--threads", "x", "invalid"),
        ("--device", "tpu", "must be cpu or cuda, got tpu"),
        ("--device", "cuda:9999", "there is no cuda:9999 here"),
        ("--device", "cuda:x", "cuda:x"),
    ],
)
def test_refuses_bad_options(option, value, message, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "kv_compact", option, value])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_quick_cases_unless_all_are_asked_for(capsys) -> None:
    assert main(["bench", "tree_attention", "--list"]) == 0
    quick = capsys.readouterr().out.splitlines()
    assert main(["bench", "tree_attention", "--list", "--full"]) == 0
    full = capsys.readouterr().out.splitlines()
    assert set(quick) < set(full)
    for model, batch, prefix, nodes in product(
        ("llama3_8b", "llama3_70b_tp8", "qwen3_8b", "smollm2_135m"),
        *((1, 8, 32), (128, 1024, 4096, 32768, 131072), (1, 8, 26, 64, 128)),
    ):
        assert f"tree_attention {model}-B{batch}-P{prefix}-T{nodes}-bfloat16" in full


def test_cases_that_do_not_fit_are_skipped() -> None:
    def reason(prefix, batch):
        case = bench_tree_attention.CASES[f"llama3_8b-B{batch}-P{prefix}-T128-bfloat16"]
        return str(bench_tree_attention.skip(case, CPU, limit))

    limit = 60.0
    assert reason(128, 1) == "None"
    assert "would take about" in reason(131072, 1) or "GB of memory" in reason(131072, 1)
    assert "GB of memory" in reason(131072, 32)
    limit = 0.01
    assert "more than the 0.01 allowed" in reason(128, 1)


def test_needs_a_clone(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(command, "REPOSITORY", tmp_path)
    assert main(["bench", "kv_compact"]) == 2
    assert "clone" in capsys.readouterr().err
