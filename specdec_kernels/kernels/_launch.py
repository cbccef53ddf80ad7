"""Launches without Triton's look at every argument, which takes 10 µs for each kernel, more than the rest of an op."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

from triton.compiler import CompiledKernel

# The compiled kernel by what it was compiled for. Strides are part of the key, so a cache that grows at every step adds
# entries that all name the same kernel: emptied at this size.
_LIMIT = 4096
_known: dict[tuple, CompiledKernel] = {}


class Call(NamedTuple):
    """A launch to be made: ``launch(*call)``.

    Attributes:
        kernel: a function under `triton.jit`.
        grid: programs in each dimension.
        args: for every parameter of the kernel, its constants included, in order.
        options: of the compiler.
        facts: all that the choice of a binary follows from: the device, the options, the constants, dtypes, which
            arguments are None, and of those that the kernel does not exempt by ``do_not_specialize`` whether they are
            1 or multiples of 16, integers, and addresses. They may tell more apart than Triton does, never less.
    """

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple
    options: dict
    facts: tuple[Hashable, ...]


def launch(kernel, grid: tuple[int, int, int], args: tuple, options: dict, facts: tuple[Hashable, ...]) -> Callable:
    """Launch as ``kernel[grid](*args, **options)`` does; the same kernel and facts start the same binary at once.

    Args: as in `Call`.

    Returns:
        What starts the kernel once more, given arguments of which all facts hold, too.
    """
    key = (kernel.fn, *facts)
    binary = _known.get(key)
    if binary is not None:
        start = binary[grid]
        start(*args)
        return start
    binary = kernel[grid](*args, **options)
    if not isinstance(binary, CompiledKernel):  # under the interpreter, or where kernels are only compiled
        return partial(kernel[grid], **options)
    if len(_known) >= _LIMIT:
        _known.clear()
    _known[key] = binary
    return binary[grid]
