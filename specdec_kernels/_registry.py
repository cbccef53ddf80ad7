"""One registration site for every op: schema, reference, fake, and where the faster kernels live.

The reference goes on ``CompositeExplicitAutograd`` and thereby serves every device. The native extension
overrides ``CPU`` (and ``CUDA`` for C++ kernels); a Triton launcher, named as ``"module:function"``, overrides
``CUDA`` where triton is installed, and is imported on the first GPU call. The tensor's device picks the kernel; there
is no back-end argument. ``Library.define`` + ``impl`` is used and not ``torch.library.custom_op``, which costs 3-9 µs a
call more.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ._ops import NAMESPACE, add_op_namespace_prefix

# The registrations live as long as this object.
_library = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class OpRecord:
    """What is registered for one op; ``OPS`` holds all of them for `doctor` and the contract test."""

    name: str
    schema: str
    reference: Callable
    triton: str | None
    native: tuple[str, ...]


OPS: dict[str, OpRecord] = {}


def define_op(
    schema: str, *, reference: Callable, fake: Callable, triton: str | None = None, native: tuple[str, ...] = ()
) -> None:
    """Register an op of this package.

    Args:
        schema: ``name(Tensor a, int b) -> Tensor``; mutated arguments are marked, ``Tensor(a!)``.
        reference: the pure-torch implementation, serving every device that has no kernel of its own.
        fake: shapes, strides and dtypes of the results; reads no data.
        triton: launcher for CUDA tensors as ``"kernels.module:function"``, imported on the first call.
        native: the devices that ``csrc/`` has a kernel for, ``"cpu"`` and ``"cuda"``, whether built here or not.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(add_op_namespace_prefix(name), fake, lib=_library)
    # Without triton the reference serves the GPU too.
    if triton is not None and importlib.util.find_spec("triton") is not None:
        _library.impl(name, _lazy_launcher(triton), "CUDA")
    OPS[name] = OpRecord(name, schema, reference, triton, native)


def has_kernel(name: str, device_type: str) -> bool:
    """Say whether an op has a kernel of its own for a type of device here, other than the reference."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix(name), device_type.upper())


def _lazy_launcher(path: str) -> Callable:
    module_name, _, function_name = path.partition(":")
    launcher: Callable | None = None

    def launch(*args, **kwargs):
        nonlocal launcher
        if launcher is None:
            launcher = getattr(importlib.import_module(f".{module_name}", __package__), function_name)
        return launcher(*args, **kwargs)

    return launch
