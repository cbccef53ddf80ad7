"""One repair of Triton's interpreter, which multiplies bfloat16 matrices as if their bits were integers."""

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

_create_dot = InterpreterBuilder.create_dot


def _dot_in_fp32(self, a, b, accumulator, *rest):
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, accumulator, *rest)


InterpreterBuilder.create_dot = _dot_in_fp32
