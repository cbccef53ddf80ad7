"""Time what `tree_attention` and `decoder_layers_` do on the host for a GPU: checks, dispatch, grid, Triton's launcher.

``python -m benchmarks.launch_overhead`` needs no GPU: the tensors lie on the CPU, the kernels are compiled for sm_90,
and the last step, the call of the driver, does nothing. All else is what runs in production.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

os.environ["SPECDEC_NATIVE"] = "0"  # so that the launcher can take the place of the CPU kernel

import torch

from benchmarks import bench_layers
from benchmarks.machine import describe_machine
from specdec_kernels import tree_attention
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


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="batches of 100 calls; a tenth of it for layers")
    repeats = parser.parse_args().repeats
    library = replace_cpu_kernels()
    launcher = _lazy_launcher(OPS["tree_attention"].triton)
    q = torch.empty(1, 26, 32, 128, dtype=torch.bfloat16)
    k, v = torch.empty(2, 1, 4096, 8, 128, dtype=torch.bfloat16)
    args = (q, k, v, torch.empty(1, 26, 1, dtype=torch.int64), torch.empty(1, dtype=torch.int32))
    case = bench_layers.Case("smollm2_135m", 1, 16, layers=8)
    inputs, layers = bench_layers.make_inputs(case, torch.device("cpu")), bench_layers.providers(case)
    print(describe_machine(torch.device("cpu")).banner())
    with torch.no_grad(), _aot.stub_driver("sm_90", "time", lambda *_: None):
        print("Llama-3-8B, T = 26, 4096 rows; two kernels, attention and merge; median µs a call:")
        for name, call in {
            "launcher": lambda: launcher(*args),
            "whole op": lambda: tree_attention(*args),
            "with a scale": lambda: tree_attention(*args, scale=0.1),
        }.items():
            print(f"{name:12} {time_us(call, repeats):6.1f}", flush=True)
        print("SmolLM2-135M, T = 16, 1024 rows, 8 layers of nine kernels; median µs a layer:")
        for name, provider in {"op by op": layers["one_by_one"], "one call": layers["specdec_kernels"]}.items():
            print(f"{name:12} {time_us(partial(provider, inputs), repeats // 10) / 8:6.1f}", flush=True)
    library._destroy()


if __name__ == "__main__":
    main()
