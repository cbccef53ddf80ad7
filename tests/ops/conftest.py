"""Run a test once for each version of the native code that this machine can execute."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdec_kernels import _native

KNOWN = ("avx2", "avx512", "avx512_bf16")


def levels() -> list[str]:
    """Return the instruction sets that kernels can be limited to here, plain C++ first; none without native kernels."""
    native = _native.native_module()
    return [] if native is None else ["plain", *(level for level in KNOWN if level in native.cpu_isa().split())]


@contextmanager
def limited_isa(level: str) -> Iterator[None]:
    """Limit native kernels to one instruction set."""
    native = _native.native_module()
    native.limit_isa(level)
    try:
        yield
    finally:
        native.limit_isa("")


SKIPPED = [pytest.param("", marks=pytest.mark.skip(reason=f"_C: {_native.load_errors['_C']}"))]


@pytest.fixture(params=levels() or SKIPPED)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each instruction set."""
    with limited_isa(request.param):
        yield request.param
