"""Run a test once for each version of the native code that this machine can execute."""

from collections.abc import Iterator

import pytest

from specdec_kernels import _native

LEVELS = ("plain", "avx2", "avx512", "avx512_bf16")


def levels() -> list:
    native = _native.native_module()
    if native is None:
        return [pytest.param("", marks=pytest.mark.skip(reason=f"_C: {_native.load_errors['_C']}"))]
    found = native.cpu_isa().split()
    return ["plain", *(level for level in LEVELS if level in found)]


@pytest.fixture(params=levels())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Limit native kernels to one instruction set."""
    native = _native.native_module()
    native.limit_isa(request.param)
    yield request.param
    native.limit_isa("")
