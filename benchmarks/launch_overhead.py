"""Time what `tree_attention` and `decoder_layers_` do on the host for a GPU: checks, dispatch, grid, Triton's launcher.

``python -m benchmarks.launch_overhead`` needs no GPU: the tensors lie on the CPU, the kernels are compiled for sm_90,
and the last step, the call of the driver, does nothing. All else is what runs in production.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

os.environ["SPECDEC_NATIVE"] = "0"  # so that the launcher can take the place of the CPU kernel

import torch

from benchmarks import bench_layers
from benchmarks.harness import RESULTS, write_records
from benchmarks.machine import describe_machine
from specdec_kernels import paged_tree_attention, tree_attention
from specdec_kernels._ops import NAMESPACE
from specdec_kernels._registry import OPS, _lazy_launcher
from specdec_kernels.kernels import _aot
from specdec_kernels.ops import decoder as decoder_op
from specdec_kernels.ops import layers as layers_op
from specdec_kernels.ops import tree_attention as tree_attention_op


def time_us(call: Callable, repeats: int) -> float:
    """Return the median over batches of 100 calls, in microseconds for a call."""
    batches = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in range(100):
            call()
        batches.append((time.perf_counter_ns() - start) / 1e5)
    return statistics.median(batches)


def replace_cpu_kernels() -> torch.library.Library:
    """Let every op with a Triton launcher take it for CPU tensors, and look at values as little as for a GPU's."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    for name, record in OPS.items():
        if record.triton is not None:
            library.impl(name, _lazy_launcher(record.triton), "CPU")
    for module in (tree_attention_op, decoder_op, layers_op):
        module.values_readable = lambda *tensors: False
    return library


def calls(launcher: Callable) -> dict[str, Callable]:
    """Return what is timed, by name: steps of 26 nodes over room for 4096 keys, of Llama-3-8B's heads."""
    q = torch.empty(1, 26, 32, 128, dtype=torch.bfloat16)
    k, v = torch.empty(2, 1, 4096, 8, 128, dtype=torch.bfloat16)
    mask, prefix_len = torch.empty(1, 26, 1, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    args = (q, k, v, mask, prefix_len)
    pages, table = (x[0].unflatten(0, (-1, 16)) for x in (k, v)), torch.empty(1, 256, dtype=torch.int32)
    paged = (q, *pages, table, mask, prefix_len)
    stored = (q, *(torch.empty(x.shape, dtype=torch.float8_e4m3fn) for x in (k, v)), mask, prefix_len)
    sinks, scales = torch.empty(32, dtype=torch.bfloat16), {"k_scale": torch.empty(8), "v_scale": torch.empty(8)}
    return {
        "launcher": lambda: launcher(*args),
        "whole op": lambda: tree_attention(*args),
        "with a scale": lambda: tree_attention(*args, scale=0.1),
        "with sinks": lambda: tree_attention(*args, sinks=sinks),
        "fp8 cache with scales": lambda: tree_attention(*stored, **scales),
        "paged": lambda: paged_tree_attention(*paged),
    }


def main() -> None:
    """Print the times, and save them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="batches of 100 calls; a tenth of it for layers")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/launch_overhead.jsonl")
    args = parser.parse_args()
    library = replace_cpu_kernels()
    machine, medians = describe_machine(torch.device("cpu")), {}
    case = bench_layers.Case("smollm2_135m", 1, 16, layers=8)
    inputs, layers = bench_layers.make_inputs(case, torch.device("cpu")), bench_layers.providers(case)
    print(machine.banner())
    with torch.no_grad(), _aot.stub_driver("sm_90", "time", lambda *_: None):
        print("Llama-3-8B, T = 26, 4096 rows; two kernels, attention and merge; median µs a call:")
        for name, call in calls(_lazy_launcher(OPS["tree_attention"].triton)).items():
            medians[name] = time_us(call, args.repeats)
            print(f"{name:22} {medians[name]:6.1f}", flush=True)
        print("SmolLM2-135M, T = 16, 1024 rows, 8 layers of nine kernels; median µs a layer:")
        for name, provider in {"op by op": layers["one_by_one"], "one call": layers["specdec_kernels"]}.items():
            medians[f"a layer, {name}"] = time_us(partial(provider, inputs), args.repeats // 10) / 8
            print(f"{name:22} {medians[f'a layer, {name}']:6.1f}", flush=True)
    library._destroy()
    if args.save:
        path = RESULTS / machine.slug / "launch_overhead.jsonl"
        records = (
            {"call": name, "median_us": round(us, 2), "machine": asdict(machine)} for name, us in medians.items()
        )
        write_records(path, records)


if __name__ == "__main__":
    main()
