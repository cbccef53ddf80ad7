"""Two repairs of Triton's interpreter, which takes the bits of bfloat16 values for integers in some places."""

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

_create_dot, _create_si_to_fp = InterpreterBuilder.create_dot, InterpreterBuilder.create_si_to_fp


def _dot_in_fp32(self, a, b, accumulator, *rest):
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, accumulator, *rest)


def _int_to_float_through_fp32(self, source, target):
    if target.scalar != tl.bfloat16:
        return _create_si_to_fp(self, source, target)
    return self.cast_impl(self.cast_impl(source, tl.float32), target)


InterpreterBuilder.create_dot = _dot_in_fp32
InterpreterBuilder.create_si_to_fp = _int_to_float_through_fp32
