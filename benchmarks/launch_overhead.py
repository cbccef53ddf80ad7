"""Time what `tree_attention` does on the host for a GPU: checks, dispatch, grid, Triton's launcher.

``python -m benchmarks.launch_overhead`` needs no GPU: the tensors lie on the CPU, the kernels are compiled for sm_90,
and the last step, the call of the driver, does nothing. All else is what runs in production.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["SPECDEC_NATIVE"] = "0"  # so that the launcher can take the place of the CPU kernel

import torch

from benchmarks.machine import describe_machine
from specdec_kernels import tree_attention
from specdec_kernels._ops import NAMESPACE
from specdec_kernels._registry import OPS, _lazy_launcher
from specdec_kernels.kernels import _aot
from specdec_kernels.ops import tree_attention as op_module


def time_us(call: Callable, repeats: int) -> float:
    """Return the median over batches of 100 calls, in microseconds for a call."""
    batches = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in range(100):
            call()
        batches.append((time.perf_counter_ns() - start) / 1e5)
    return statistics.median(batches)


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="batches of 100 calls")
    repeats = parser.parse_args().repeats
    library = torch.library.Library(NAMESPACE, "IMPL")
    launcher = _lazy_launcher(OPS["tree_attention"].triton)
    library.impl("tree_attention", launcher, "CPU")
    op_module.values_readable = lambda *tensors: False  # as for GPU tensors

    q = torch.empty(1, 26, 32, 128, dtype=torch.bfloat16)
    k, v = torch.empty(2, 1, 4096, 8, 128, dtype=torch.bfloat16)
    args = (q, k, v, torch.empty(1, 26, 1, dtype=torch.int64), torch.empty(1, dtype=torch.int32))
    print(describe_machine(torch.device("cpu")).banner())
    with _aot.stub_driver("sm_90", "time", lambda *_: None):
        print("Llama-3-8B, T = 26, 4096 rows; two kernels, attention and merge; median µs a call:")
        for name, call in {
            "launcher": lambda: launcher(*args),
            "whole op": lambda: tree_attention(*args),
            "with a scale": lambda: tree_attention(*args, scale=0.1),
        }.items():
            print(f"{name:12} {time_us(call, repeats):6.1f}", flush=True)


if __name__ == "__main__":
    main()
