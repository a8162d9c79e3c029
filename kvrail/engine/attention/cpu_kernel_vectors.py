"""Vectors of LANES floats on a CPU, written in LLVM IR: numba's compiler does not make this code from loops.

numba's compiled code calls these functions. Arrays are flat; pools are bytes. Indices, strides and counts are in
elements, or in bytes where a name says so. LLVM splits a vector into what the processor has: 512 bits or fewer.
"""

# What numba compiles has no types that mypy can follow.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, misc"

import math
from typing import Any

from llvmlite import ir
from numba import config, float32, types, void
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

BFLOAT16, FLOAT16, FLOAT32, E4M3, E5M2 = range(5)
"""Element types of pages."""
LANES = 16
WIDE = 4 * LANES
_FEATURES: str = config.CPU_FEATURES or get_host_cpu_features()  # type: ignore[attr-defined]
ROWS = 4 if "+avx512f" in _FEATURES.split(",") else 1
"""Rows of a product computed together: as many as fit into registers beside WIDE columns."""

_i16, _i32, _i64, _f32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _halves, _words = (ir.VectorType(kind, LANES) for kind in (_f32, _i16, _i32))


def _all(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * LANES)


def _splat(builder: Any, value: Any) -> Any:
    empty = ir.Constant(_floats, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(empty, value, _i32(0)), empty, _all(_words, 0))


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, element: Any) -> Any:
    """The address of array[index], as a pointer to `element`."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())


def _vector(builder: Any, pointer: Any, offset: Any) -> Any:
    """The address of LANES floats, `offset` floats behind `pointer`."""
    return builder.bitcast(builder.gep(pointer, [offset]), _floats.as_pointer())


def _product(rows: int, columns: int) -> Any:
    """c[i, j] += sum of a[i, k] * b[k, j] over k, in the order of k, for `rows` i and LANES * `columns` j.

    Arrays are float32 and flat. a begins at a_at and has strides a_row and 1; b begins at b_at and has strides b_step
    and 1; c begins at c_at and has strides c_row and 1; count: the number of k, at least 1.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_at, a_row, b, b_at, b_step, c, c_at, c_row, count = arguments
        kinds = signature.args
        a, b, c = (
            _address(context, builder, kind, array, at, _f32)
            for kind, array, at in ((kinds[0], a, a_at), (kinds[3], b, b_at), (kinds[6], c, c_at))
        )
        fused = ir.FunctionType(_floats, [_floats] * 3)
        multiply_add = builder.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), fused)
        a_rows = [builder.mul(_i64(i), a_row) for i in range(rows)]
        sums = [
            _vector(builder, c, builder.add(builder.mul(_i64(i), c_row), _i64(LANES * j)))
            for i in range(rows)
            for j in range(columns)
        ]
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        begun = [builder.load(pointer, align=4) for pointer in sums]
        builder.branch(loop)
        builder.position_at_end(loop)
        k, *old = (builder.phi(kind) for kind in [_i64] + [_floats] * len(sums))
        b_row = builder.mul(k, b_step)
        right = [
            builder.load(_vector(builder, b, builder.add(b_row, _i64(LANES * j))), align=4) for j in range(columns)
        ]
        left = [_splat(builder, builder.load(builder.gep(a, [builder.add(k, row)]))) for row in a_rows]
        new = [
            builder.call(multiply_add, [left[i // columns], right[i % columns], old[i]]) for i in range(rows * columns)
        ]
        following = builder.add(k, _i64(1))
        for phi, first, then in zip([k, *old], [_i64(0), *begun], [following, *new], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(then, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)
        for pointer, value in zip(sums, new, strict=True):
            builder.store(value, pointer, align=4)
        return context.get_dummy_value()

    def add_product(typing, a, a_at, a_row, b, b_at, b_step, c, c_at, c_row, count):
        at = types.intp
        return void(a, at, at, b, at, at, c, at, at, at), generate

    return intrinsic(add_product)


add_products_wide, add_products_narrow = _product(ROWS, 4), _product(ROWS, 1)
add_product_wide, add_product_narrow = _product(1, 4), _product(1, 1)


def _widened(builder: Any, kind: int, pointer: Any) -> Any:
    """LANES elements of a page as floats. pointer: to bytes."""
    eight = ir.VectorType(ir.IntType(8), LANES)
    stored = {FLOAT32: _floats, E4M3: eight, E5M2: eight}.get(kind, _halves)
    x = builder.load(builder.bitcast(pointer, stored.as_pointer()), align=1)
    if kind == FLOAT32:
        return x
    if kind == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(x, _words), _all(_words, 16)), _floats)
    real_halves = ir.VectorType(ir.HalfType(), LANES)
    if kind == FLOAT16:
        return builder.fpext(builder.bitcast(x, real_halves), _floats)
    wide = builder.zext(x, _halves)
    if kind == E5M2:  # the upper byte of float16
        return builder.fpext(builder.bitcast(builder.shl(wide, _all(_halves, 8)), real_halves), _floats)
    magnitude = builder.and_(wide, _all(_halves, 0x7F))
    sign = builder.shl(builder.and_(wide, _all(_halves, 0x80)), _all(_halves, 8))
    half = builder.or_(builder.shl(magnitude, _all(_halves, 7)), sign)  # float16's exponent has a bias larger by 8
    value = builder.fmul(builder.fpext(builder.bitcast(half, real_halves), _floats), _all(_floats, 256.0))
    nan = builder.icmp_unsigned("==", magnitude, _all(_halves, 0x7F))
    return builder.select(nan, _all(_floats, math.nan), value)


def _widener(kind: int) -> Any:
    """out[at : at + LANES] = scale * the elements that begin at byte `byte` of a pool."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pool, byte, out, at, scale = arguments
        x = _widened(builder, kind, _address(context, builder, signature.args[0], pool, byte, ir.IntType(8)))
        to = _address(context, builder, signature.args[2], out, at, _floats)
        builder.store(builder.fmul(x, _splat(builder, scale)), to, align=4)
        return context.get_dummy_value()

    def widen(typing, pool, byte, out, at, scale):
        return void(pool, types.intp, out, types.intp, float32), generate

    return intrinsic(widen)


widen_bfloat16, widen_float16, widen_float32, widen_e4m3, widen_e5m2 = map(_widener, range(5))


@intrinsic
def transpose(typing, source, at, step, out, out_at, out_step):
    """out[j, i] = source[i, j] of LANES * LANES floats; arrays are flat, with strides step and 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, step, out, out_at, out_step = arguments
        begin = _address(context, builder, signature.args[0], source, at, _f32)
        to = _address(context, builder, signature.args[3], out, out_at, _f32)
        rows = [builder.load(_vector(builder, begin, builder.mul(_i64(i), step)), align=4) for i in range(LANES)]
        distance = 1
        while distance < LANES:  # swap this bit of the row's number with that of the column's
            for i in (i for i in range(LANES) if not i & distance):
                pair = rows[i], rows[i | distance]
                for row in (i, i | distance):
                    picks = [
                        (LANES if lane & distance else 0) + (lane if not (lane ^ row) & distance else lane ^ distance)
                        for lane in range(LANES)
                    ]
                    rows[row] = builder.shuffle_vector(*pair, ir.Constant(_words, picks))
            distance *= 2
        for i, row in enumerate(rows):
            builder.store(row, _vector(builder, to, builder.mul(_i64(i), out_step)), align=4)
        return context.get_dummy_value()

    return void(source, types.intp, types.intp, out, types.intp, types.intp), generate


@intrinsic
def prefetch(typing, pool, byte):
    """Prefetch the cache line of a pool's byte."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pool, byte = arguments
        pointer = _address(context, builder, signature.args[0], pool, byte, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _i32, _i32, _i32])
        call = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        to_read, to_second_cache, data = _i32(0), _i32(2), _i32(1)  # into the first it was slower
        builder.call(call, [pointer, to_read, to_second_cache, data])
        return context.get_dummy_value()

    return void(pool, types.intp), generate
