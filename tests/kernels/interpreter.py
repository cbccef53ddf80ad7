"""Triton's interpreter, repaired and made faster; imported where kernels are interpreted.

- It takes the bits of bfloat16 values for integers, in products of matrices and in conversions from integers.
- It cuts fp32 off to bfloat16 where GPUs round to the nearest, and loses subnormal bfloat16 values.
- It patches `triton.language` anew for every call of a helper function; once for each launch is enough.
- It reduces by exclusive or, which sorting does all the time, element by element in Python.
- Around every operation it filters keyword arguments and builds a table of dtypes.
"""

import inspect
from functools import cache

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, TensorHandle

_create_dot, _create_si_to_fp = InterpreterBuilder.create_dot, InterpreterBuilder.create_si_to_fp
_dtype_of_scalar = cache(interpreter._get_np_dtype)
_patch_lang, _run_grid = interpreter._patch_lang, GridExecutor.__call__
_cast, _generic_reduce = InterpreterBuilder.cast_impl, ReduceOps.generic_reduce
_patched: set[str] = set()


def _dot_in_fp32(self, a, b, accumulator, *rest):
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, accumulator, *rest)


def _int_to_float_through_fp32(self, source, target):
    if target.scalar != tl.bfloat16:
        return _create_si_to_fp(self, source, target)
    return self.cast_impl(self.cast_impl(source, tl.float32), target)


def _convert_bfloat16(self, source, target):
    types = source.dtype.scalar, target.scalar
    if types == (tl.bfloat16, tl.float32):
        bits = source.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)
    if types == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16).view(torch.int16).numpy()
        return TensorHandle(rounded.view(np.uint16), tl.bfloat16)
    return _cast(self, source, target)


@cache
def _languages(fn) -> frozenset[str]:
    return frozenset(v.__name__ for v in fn.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core))


def _patch_lang_once(fn):
    seen = _languages(fn)
    if seen <= _patched:
        return None  # a helper's; only the launch itself uses the scope
    _patched.update(seen)
    return _patch_lang(fn)


def _run_grid_patched_once(self, *args, **kwargs):
    _patched.clear()
    try:
        return _run_grid(self, *args, **kwargs)
    finally:
        _patched.clear()


def _reduce_by_xor_at_once(self, inputs):
    if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
        return _generic_reduce(self, inputs)
    data = np.bitwise_xor.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return [self.to_tensor(data, inputs[0].dtype)]


def _patch_attr_simply(obj, name, member, builder, scope) -> None:
    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _get_np_dtype_once(dtype):
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _dtype_of_scalar(scalar)


interpreter._get_np_dtype, interpreter._patch_attr = _get_np_dtype_once, _patch_attr_simply
InterpreterBuilder.create_dot = _dot_in_fp32
InterpreterBuilder.cast_impl = _convert_bfloat16
InterpreterBuilder.create_si_to_fp = _int_to_float_through_fp32
interpreter._patch_lang = _patch_lang_once
GridExecutor.__call__ = _run_grid_patched_once
ReduceOps.generic_reduce = _reduce_by_xor_at_once
