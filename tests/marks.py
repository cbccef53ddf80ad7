"""Marks that several tests share."""

import pytest

from specdec_kernels import _native

needs_native = pytest.mark.skipif(_native.load_errors["_C"] is not None, reason=f"_C: {_native.load_errors['_C']}")
