"""What the Triton launchers share: facts of the device, launch parameters from ``configs/``, and the launch itself."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, which costs a launch nothing
class Device:
    """What a launcher needs to know of a GPU.

    Attributes:
        names: keys of launch parameters, most special first: the device's name, its architecture, ``default``.
        num_multiprocessors: how many programs run side by side at least.
        has_fp8: whether Triton converts float8_e4m3fn there; elsewhere the kernels take the bytes apart.
        has_tf32: whether its matrix units take tf32, the shorter form of fp32 that torch can be told to allow.
    """

    names: tuple[str, ...]
    num_multiprocessors: int
    has_fp8: bool
    has_tf32: bool = True


# For CPU tensors, that is under the interpreter: an H200's size, so that the same splits are tested.
_INTERPRETED = Device(("default",), 132, True)
_override: Device | None = None


def device_of(tensor: Tensor) -> Device:
    """Return the facts of a tensor's device."""
    if _override is not None:
        return _override
    return _probe(tensor.device.index) if tensor.device.type == "cuda" else _INTERPRETED


@contextmanager
def pretend_device(device: Device) -> Iterator[None]:
    """Let launchers choose parameters for another device than the tensors'; for ahead-of-time compilation and tests."""
    global _override
    before, _override = _override, device
    try:
        yield
    finally:
        _override = before


@cache
def _probe(index: int) -> Device:
    facts = torch.cuda.get_device_properties(index)
    name = re.sub(r"\W+", "_", facts.name)
    if torch.version.hip is not None:
        arch = facts.gcnArchName.partition(":")[0]
        return Device((name, arch, "hip", "default"), facts.multi_processor_count, arch == "gfx950", arch == "gfx942")
    return nvidia_device(facts.major * 10 + facts.minor, facts.multi_processor_count, name)


def nvidia_device(capability: int, num_multiprocessors: int, *names: str) -> Device:
    """Return the facts of an NVIDIA GPU; its family, the last architecture with the same matrix unit, is a name too."""
    family = f"sm_{capability // 10}0" if capability // 10 in (9, 10) else "sm_80"
    names = (*names, *dict.fromkeys((f"sm_{capability}", family)), "default")
    return Device(names, num_multiprocessors, capability >= 89)


@cache
def launch_parameters(stem: str, names: tuple[str, ...]) -> dict:
    """Read ``configs/<stem>.<name>.json`` of the first name that has one."""
    for name in names:
        path = CONFIGS / f"{stem}.{name}.json"
        if path.exists():
            return json.loads(path.read_text())
    raise RuntimeError(f"{stem}: no launch parameters for any of {names} in {CONFIGS.name}")


def dot_precision(x: Tensor) -> str:
    """Return how `tl.dot` shall multiply with ``x``: fp32 as IEEE says, unless torch was told that less will do."""
    # Not torch.get_float32_matmul_precision(), which raises where the precision was set for one back end.
    if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" and device_of(x).has_tf32:
        return "tf32"
    return "ieee"


def block(size: int) -> int:
    """Return the power of two that holds ``size``, at least 16, the smallest side of a matrix instruction."""
    return max(16, 1 << (size - 1).bit_length())


def rows_of(x: Tensor) -> Tensor:
    """Return ``(..., C)`` as ``(outer, inner, C)``; a view unless its rows need more than two strides."""
    if x.dim() <= 3:
        return x[(None,) * (3 - x.dim())]
    sizes, strides = x.shape, x.stride()
    if all(strides[i] == sizes[i + 1] * strides[i + 1] for i in range(x.dim() - 3)):
        return x.flatten(0, -3)
    return x.flatten(1, -2)
