"""A traffic meter: what a Triton kernel loads and stores, counted under the interpreter.

::

    with measure() as launches:
        tree_attention_triton(...)
    launches[0].kernel               # "_tree_attention_kernel"
    launches[0].traffic["k_ptr"]     # Traffic(loaded=..., stored=..., distinct=...)

Every address must belong to an element of a tensor that the launch was given; one outside raises, naming the kernel.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder


@dataclass
class Traffic:
    """Bytes between a kernel and one of its tensors.

    ``loaded`` and ``stored`` add up, over all accesses, the bytes of active lanes; lanes of one access that ask for the
    same element count once, as the hardware serves them together. ``distinct`` counts each byte once for the launch.
    """

    loaded: int = 0
    stored: int = 0
    distinct: int = 0

    @property
    def moved(self) -> int:
        return self.loaded + self.stored


@dataclass
class Launch:
    """One launch of one kernel."""

    kernel: str
    programs: int
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def moved(self, *names: str) -> int:
        """Return the bytes moved from and to the named arguments, or all."""
        return sum(t.moved for name, t in self.traffic.items() if not names or name in names)


class _Argument:
    """A tensor argument: which addresses are elements of it, and which were touched."""

    def __init__(self, tensor: Tensor):
        flags = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size() + 1, dtype=torch.bool)
        flags.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(True)
        self.owned = flags.numpy()
        self.touched = np.zeros_like(self.owned)
        self.base = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
        self.itemsize = tensor.element_size()

    def holds(self, addresses: np.ndarray) -> np.ndarray:
        index, rest = np.divmod(addresses - self.base, self.itemsize)
        inside = (addresses >= self.base) & (index < len(self.owned)) & (rest == 0)
        return inside & self.owned[np.where(inside, index, 0)]

    def touch(self, addresses: np.ndarray) -> int:
        """Mark elements and return their number, duplicates counted once."""
        index = np.unique(addresses - self.base) // self.itemsize
        self.touched[index] = True
        return len(index)


def _tensors(arguments) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among arguments; those in a tuple as ``argument.field``, or ``argument.0``, ``argument.1`` …"""
    for name, value in arguments:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            yield from ((f"{name}.{f}", x) for f, x in zip(fields, value, strict=True) if isinstance(x, Tensor))


class _Recorder:
    """The launch in progress."""

    def __init__(self, kernel: str, grid, arguments: dict):
        self.launch = Launch(kernel, math.prod(grid(arguments) if callable(grid) else grid))
        tensors = dict(_tensors(arguments.items()))
        self._arguments = {name: _Argument(t) for name, t in tensors.items() if t.numel()}

    def record(self, pointers: np.ndarray, active: np.ndarray, stored: bool) -> None:
        addresses = np.broadcast_to(pointers, active.shape)[active].astype(np.int64).ravel()
        for name, argument in self._arguments.items():
            if not len(addresses):
                return
            mine = argument.holds(addresses)
            if mine.any():
                traffic = self.launch.traffic.setdefault(name, Traffic())
                size = argument.touch(addresses[mine]) * argument.itemsize
                if stored:
                    traffic.stored += size
                else:
                    traffic.loaded += size
                addresses = addresses[~mine]
        if len(addresses):
            kind = "store" if stored else "load"
            raise AssertionError(f"{self.launch.kernel}: {kind} outside every tensor, first at {addresses[0]:#x}")

    def finish(self) -> Launch:
        for name, traffic in self.launch.traffic.items():
            argument = self._arguments[name]
            traffic.distinct = int(argument.touched.sum()) * argument.itemsize
        return self.launch


@contextmanager
def measure() -> Iterator[list[Launch]]:
    """Count the accesses of every kernel launched inside; yield the list of launches."""
    launches: list[Launch] = []
    current: list[_Recorder] = []
    run, load, store = (
        InterpretedFunction.run,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def counted_run(self, *args, grid, warmup, **kwargs):
        current.append(_Recorder(self.fn.__name__, grid, dict(zip(self.arg_names, args, strict=False)) | kwargs))
        try:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            launches.append(current.pop().finish())

    def counted_load(self, pointers, mask, *rest, **options):
        current[-1].record(pointers.data, mask.data.astype(bool), stored=False)
        return load(self, pointers, mask, *rest, **options)

    def counted_store(self, pointers, value, mask, *rest, **options):
        current[-1].record(pointers.data, mask.data.astype(bool), stored=True)
        return store(self, pointers, value, mask, *rest, **options)

    InterpretedFunction.run = counted_run
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counted_load, counted_store
    try:
        yield launches
    finally:
        InterpretedFunction.run = run
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
