"""Triton's interpreter, mended and quickened for the tests; importing this patches it."""

import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
    interpreter_builder,
)

call_anew, multiply, cast, array_dtype = (
    InterpretedFunction.__call__,
    InterpreterBuilder.create_dot,
    InterpreterBuilder.cast_impl,
    interpreter._get_np_dtype,
)
make_block, with_element = tl.block_type.__init__, tl.block_type.with_element_ty
broadcast, common_type = TritonSemantic.broadcast_impl_value, TritonSemantic.computation_type_impl
sides_of = TritonSemantic.binary_op_type_checking_impl


def call_from_kernel(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
    """The interpreter puts its functions into triton.language anew at each such call: minutes in all."""
    if (languages := vars(self).get("languages")) is None:
        languages = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
        self.languages = languages
    if any(tl.core.is_builtin(language.load) for language in languages):
        return call_anew(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


def multiply_values(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *more: object) -> TensorHandle:
    """The interpreter multiplies bfloat16 by their bits, as integers."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return multiply(self, a, b, *more)


def cast_to_nearest(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    """The interpreter cuts a float32's lower bits off where a GPU rounds it to the nearest bfloat16, ties to even."""
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
        return cast(self, src, dst_type)
    bits = np.ascontiguousarray(src.data).view(np.uint32).astype(np.uint64)
    nearest = np.where(np.isnan(src.data), bits | 1 << 22, bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return TensorHandle(nearest.astype(np.uint16), tl.bfloat16)


def bfloat16_constant(self: InterpreterBuilder, value: float) -> TensorHandle:
    """The compiler rounds constants of bfloat16 to six decimals, so that small ones are 0."""
    return self.create_fp_trunc(self.get_fp32(float(f"{value:f}")), tl.bfloat16)


def all_ones(self: InterpreterBuilder, type: tl.dtype) -> TensorHandle:
    """Up to Triton 3.7 the interpreter asks NumPy for an unsigned -1, which NumPy refuses from 2.0 on."""
    return TensorHandle(np.full(1, -1, dtype=np.int64).astype(interpreter._get_np_dtype(type)), type.scalar)


def smaller(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
    """Up to Triton 3.7 the interpreter's minimum of a number and NaN is NaN; on a GPU it is the number."""
    return self.binary_op(lhs, rhs, np.fmin)


def larger(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
    """As `smaller`."""
    return self.binary_op(lhs, rhs, np.fmax)


InterpretedFunction.__call__, InterpreterBuilder.create_dot = call_from_kernel, multiply_values
InterpreterBuilder.cast_impl = cast_to_nearest
InterpreterBuilder.get_bf16, InterpreterBuilder.get_all_ones_value = bfloat16_constant, all_ones
InterpreterBuilder.create_minnumf, InterpreterBuilder.create_maxnumf = smaller, larger
# Of each sum and product of integers it would find out whether it overflows, and tell nobody: half of the time.
interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)

# Types and shapes are few, and an operation makes several of them: each is made once, and found again by its name.
_arrays: dict[str, np.dtype] = {}
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_kin: dict[tuple[str, str], tl.block_type] = {}
_shapes: dict[tuple[int, ...], tuple[tl.tuple, tl.constexpr]] = {}
_commons: dict[tuple[Any, ...], tl.dtype] = {}
_numbers: dict[tuple[Any, ...], tl.tensor] = {}


def remember_array(dtype: tl.dtype) -> np.dtype:
    found = _arrays.get(dtype.name)
    if found is None:
        found = _arrays[dtype.name] = array_dtype(dtype)
    return found


def remember_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
    if key not in _blocks:
        make_block(self, element_ty, shape)
        _blocks[key] = vars(self).copy()
    else:
        vars(self).update(_blocks[key])


def remember_kin(self: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
    key = (self.name, scalar_ty.name)
    found = _kin.get(key)
    if found is None:
        found = _kin[key] = with_element(self, scalar_ty)
    return found


def make_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = tuple(type.shape) if type.is_block() else ()
    found = _shapes.get(sizes)
    if found is None:
        shape = tl.tuple([tl.constexpr(size) for size in sizes])
        found = _shapes[sizes] = (shape, tl.constexpr(math.prod(sizes)))
    self.shape, self.numel = found


def same_type(self: tl.dtype, other: object) -> bool:
    return self is other or (isinstance(other := getattr(other, "value", other), tl.dtype) and self.name == other.name)


def broadcast_unlike(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Tensors of one shape have one object as theirs, see `make_tensor`."""
    return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)


def remember_common(
    self: TritonSemantic, a: tl.dtype, a_scalar: bool, b: tl.dtype, b_scalar: bool, divides: bool
) -> tl.dtype:
    key = (a.name, a_scalar, b.name, b_scalar, divides)
    found = _commons.get(key)
    if found is None:
        found = _commons[key] = common_type(self, a, a_scalar, b, b_scalar, divides)
    return found


def remember_number(self: TritonSemantic, lhs: Any, rhs: Any, *more: bool, **options: bool) -> tuple[Any, Any]:
    """Both sides of an operation. A number beside a tensor that stays as it is becomes one of that type and shape."""
    if not isinstance(rhs, (int, float)) or not isinstance(lhs, tl.tensor):
        return sides_of(self, lhs, rhs, *more, **options)
    key = (repr(rhs), lhs.type.name, more, *options.items())
    found = _numbers.get(key)
    if found is None:
        left, found = sides_of(self, lhs, rhs, *more, **options)
        if left is not lhs:
            return left, found
        found.handle.data.flags.writeable = False
        _numbers[key] = found
    return lhs, found


def put(owner: object, name: str, member: Any, builder: object, scope: Any) -> None:
    """A builtin of the language that a kernel calls without its semantic."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args: object, **kwargs: object) -> object:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    scope.set_attr(owner, name, call)


interpreter._get_np_dtype, interpreter._patch_attr = remember_array, put
tl.block_type.__init__, tl.block_type.with_element_ty = remember_block, remember_kin
tl.tensor.__init__, tl.dtype.__eq__ = make_tensor, same_type
TritonSemantic.binary_op_type_checking_impl = remember_number
TritonSemantic.broadcast_impl_value, TritonSemantic.computation_type_impl = broadcast_unlike, remember_common
