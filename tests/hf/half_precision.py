"""Where equal bits in half precision are promised: native attention, on machines with AVX512-bf16 linear layers."""

import pytest

from specdec_kernels import _native

_native_module = _native.native_module()
EQUAL_BITS = _native_module is not None and "avx512_bf16" in _native_module.cpu_isa().split()

equal_bits = pytest.mark.skipif(
    not EQUAL_BITS, reason="equal bits in 16 bits are promised with native kernels and AVX512-bf16 only"
)
