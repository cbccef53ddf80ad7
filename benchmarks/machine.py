"""The machine a benchmark runs on: its name, and its own measured roofline."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from specdec_kernels import __version__, _machine, _native

# Far larger than any last-level cache, small enough for a laptop.
STREAM_BYTES = 256 << 20
MATMUL_SIZE = 1024


@dataclass(frozen=True)
class Machine:
    """What is printed above every table and stored with every result; no host names, no paths."""

    device: str
    model: str
    cores: int
    isa: str
    threads: int
    torch: str
    specdec_kernels: str

    @property
    def slug(self) -> str:
        """Folder name for results: ``amd-epyc-7763``."""
        return _machine.slug(self.model)

    def banner(self) -> str:
        """Return one line for people."""
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items())


@dataclass(frozen=True)
class Roofline:
    """Measured limits: streaming through memory by bytes moved, and dense fp32/bf16 matmul."""

    read_gb_s: float
    copy_gb_s: float
    matmul_gflop_s: dict[str, float]

    def banner(self) -> str:
        """Return one line for people."""
        matmul = ", ".join(f"{dtype} matmul {rate:.0f} Gflop/s" for dtype, rate in self.matmul_gflop_s.items())
        return f"measured roofline: read {self.read_gb_s:.1f} GB/s, copy {self.copy_gb_s:.1f} GB/s, {matmul}"


def describe_machine(device: torch.device) -> Machine:
    """Find out what this machine is."""
    native = _native.native_module()
    return Machine(
        device=device.type,
        model=_machine.device_name(device),
        cores=_cores(),
        isa=native.cpu_isa().split()[-1] if native else "unknown (no native extension)",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        specdec_kernels=__version__,
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_roofline(device: torch.device) -> Roofline:
    """Measure reading, copying and multiplying with torch's own operations, each the best of a few runs."""
    source = torch.ones(STREAM_BYTES // 4, device=device)
    target = torch.empty_like(source)
    read = _best_seconds(lambda: source.sum(), device)
    copy = _best_seconds(lambda: target.copy_(source), device)
    matmul = {}
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=device)
        seconds = _best_seconds(lambda square=square: square @ square, device)
        matmul[str(dtype).removeprefix("torch.")] = 2 * MATMUL_SIZE**3 / seconds / 1e9
    return Roofline(STREAM_BYTES / read / 1e9, 2 * STREAM_BYTES / copy / 1e9, matmul)


def _best_seconds(function: Callable[[], Tensor], device: torch.device, repeats: int = 7) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
