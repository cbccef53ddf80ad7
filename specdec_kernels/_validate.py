"""Argument checks, written once. Every message names the op, the argument, and both values.

Two kinds: *metadata* (shape, dtype, device, stride) is checked always; *values* (a length, a parent) only where
reading them is free, that is on CPU tensors outside compilation. On a GPU a value check would wait for the device;
the docstring of each op says what is not checked there.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import mul

import torch
from torch import Tensor


def check_tensor(op: str, name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a tensor with strides (not sparse, for example)."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got layout {value.layout}")


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int | str]) -> None:
    """Raise ValueError unless the shape matches; a string in ``expected`` names a free dimension.

    ``check_shape("tree_attention", "k_cache", k, (2, "S", 8, 64))``
    """
    check_tensor(op, name, tensor)
    if not _has_shape(tensor, expected):
        want = "(" + ", ".join(str(e) for e in expected) + ("," if len(expected) == 1 else "") + ")"
        raise ValueError(f"{op}: {name} must have shape {want}, got {tuple(tensor.shape)}")


def _has_shape(tensor: Tensor, expected: Sequence[int | str]) -> bool:
    shape = tensor.shape
    if len(shape) != len(expected):
        return False
    # A list: a generator costs more than the comparison, and ops in a model's inner loop pass here.
    return not [want for have, want in zip(shape, expected, strict=True) if not isinstance(want, str) and have != want]


def check_kind(
    op: str,
    name: str,
    tensor: Tensor,
    expected: Sequence[int | str],
    allowed: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Check shape, dtype and device.

    One test where nothing is wrong; the checks behind it find the words. Ops that run once a step come with cold
    caches, where every function that is called costs some microseconds.
    """
    if not (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.dtype in allowed
        and tensor.device == device
        and _has_shape(tensor, expected)
    ):
        check_shape(op, name, tensor, expected)
        check_dtype(op, name, tensor, allowed)
        check_device(op, name, tensor, device)


def check_rows(
    op: str,
    name: str,
    tensor: Tensor,
    expected: Sequence[int | str],
    allowed: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Check what `check_kind` does, and that the last dimension is contiguous."""
    check_kind(op, name, tensor, expected, allowed, device)
    if tensor.stride(-1) != 1:
        check_last_stride(op, name, tensor)


def check_dtype(op: str, name: str, tensor: Tensor, allowed: Iterable[torch.dtype]) -> None:
    """Raise TypeError unless the dtype is one of ``allowed``."""
    allowed = tuple(allowed)
    if tensor.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{op}: {name} must be {names}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is on ``device``."""
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {tensor.device}")


def check_last_stride(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension is contiguous; other strides are free."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise ValueError(f"{op}: {name} must have stride 1 in its last dimension, got strides {tensor.stride()}")


def check_number(op: str, name: str, value: object, *, whole: bool = False) -> None:
    """Raise TypeError unless the value is a Python number (``whole``: an int); ``bool`` is none."""
    kinds = (int, torch.SymInt) if whole else (int, float, torch.SymInt, torch.SymFloat)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be {'an int' if whole else 'a number'}, got {type(value).__name__}")
    if whole and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{op}: {name} must fit in 64 bits, got {value}")


def check_range(op: str, name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless ``low <= value <= high`` (a Python number)."""
    if not low <= value <= high:
        raise ValueError(f"{op}: {name} must be in [{low}, {high}], got {value}")


def check_no_grad(op: str, **tensors: Tensor | None) -> None:
    """Raise RuntimeError when grad is on and an input requires it: these ops are for inference."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise RuntimeError(f"{op}: {name} requires grad, but the op has no backward; use torch.no_grad()")


def share_elements(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors of one dtype have an element in common; cheap where they lie apart, as is usual.

    Under compilation and tracing, where memory has no address, only whether they are the same object.
    """
    if torch.compiler.is_compiling() or not all(type(t) is Tensor and not t.is_meta for t in (one, other)):
        return one is other
    (begin, end), (other_begin, other_end) = _span(one), _span(other)
    if max(begin, other_begin) >= min(end, other_end):
        return False
    return not set(_addresses(one)).isdisjoint(_addresses(other))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where the elements begin and end in memory."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + tensor.element_size() * (steps + 1)


def _addresses(tensor: Tensor) -> Iterator[int]:
    first, size, strides = tensor.data_ptr(), tensor.element_size(), tensor.stride()
    for index in product(*map(range, tensor.shape)):
        yield first + size * sum(map(mul, index, strides))


def values_readable(*tensors: Tensor | None) -> bool:
    """Say whether values may be read without waiting for a device: CPU tensors, not under compilation or tracing."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and (not tensor.is_cpu or type(tensor) not in (Tensor, torch.nn.Parameter)):
            return False
    return True


def check_values(op: str, name: str, tensor: Tensor, low: int, high: int) -> None:
    """Raise ValueError unless all values lie in [low, high]; call it under ``values_readable`` only."""
    count = tensor.numel()
    if count:
        if count <= 64:  # a list is faster than torch's dispatch
            values = tensor.flatten().tolist() if tensor.dim() != 1 else tensor.tolist()
            smallest, largest = min(values), max(values)
        else:
            smallest, largest = (int(x) for x in torch.aminmax(tensor))
        if smallest < low or largest > high:
            bad = smallest if smallest < low else largest
            raise ValueError(f"{op}: {name} must be in [{low}, {high}], got {bad}")
