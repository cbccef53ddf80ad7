"""`benchmarks.attention_tables`: what the documentation has of a result file."""

import json

from benchmarks import attention_tables as tables


def write(path, times):
    records = [
        {"case": case, "provider": provider, "median_us": us, "roofline_percent": 50.0}
        for case, of_provider in times.items()
        for provider, us in of_provider.items()
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_best_form_of_torch_counts_and_what_is_absent_is_a_dash(tmp_path) -> None:
    times = {
        "llama3_8b-B1-P512-T16-bfloat16": {"specdec_kernels": 100, "sdpa_gqa": 400, "sdpa_folded": 300, "reference": 9},
        "llama3_8b-B1-P512-T16-float32": {"specdec_kernels": 200, "sdpa_gqa": 300, "extend_attention_cpu": 900},
        "llama3_8b-B1-P4096-T16-bfloat16": {"specdec_kernels": 10, "sdpa_gqa": 20, "extend_attention_cpu": 45},
        "llama3_8b-B1-P1024-T16-bfloat16": {"specdec_kernels": 10, "sdpa_gqa": 20},
        "llama3_8b-B1-P0-T512-bfloat16-chain": {"specdec_kernels": 10, "sdpa_gqa": 80, "sdpa_causal": 40},
    }
    path = write(tmp_path / "tree_attention.jsonl", times)
    assert tables.grid(path)[2:] == [
        "| 512 | 16 | 100 | 50 | 3.0 × | - | 200 | 1.5 × |",
        "| 4096 | 16 | 10 | 50 | 2.0 × | 4.5 × | - | - |",
    ]
    assert tables.others(path)[2:] == ["| llama3_8b-B1-P0-T512-bfloat16-chain | 10 | 50 | 4.0 × | - |"]


def test_growth_is_told_for_each_key(tmp_path) -> None:
    times = {
        f"llama3_8b-B1-P{prefix}-T{nodes}-bfloat16": {"specdec_kernels": prefix * nodes / 100}
        for prefix in (8192, 1024)
        for nodes in (1, 26)
    }
    assert tables.growth(write(tmp_path / "tree_attention.jsonl", times)) == [
        *("| P | 1024 | 8192 |", "| --- | --- | --- |"),
        *("| T = 1: µs | 10 | 82 |", "| ns per key | 10 | 10 |"),
        *("| T = 26: µs | 266 | 2130 |", "| ns per key | 260 | 260 |"),
    ]
