"""Words of 64 bits at any byte of memory, little-endian, for kernels on a CPU."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type"
# mypy: disable-error-code="call-arg, call-overload, attr-defined"

from typing import Any

from llvmlite import binding, ir
from numba import carray, njit, types, uint8, uint64, void
from numba.core import cgutils, config
from numba.extending import intrinsic


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(ir.IntType(64)))


def _deposits() -> bool:
    """Whether kernels are compiled for a core that has the instructions of `deposited` and `extracted`."""
    if config.CPU_FEATURES is not None or config.CPU_NAME not in (None, "host"):
        return False
    try:
        return bool(binding.get_host_cpu_features().get("bmi2", False))
    except RuntimeError:  # llvmlite does not know this core
        return False


DEPOSITS = _deposits()


@intrinsic
def load_word(typing_context: Any, address: Any) -> Any:
    """The eight bytes from `address` on, which need not be aligned. The caller has checked that they may be read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(builder, arguments[0]), align=1)

    return uint64(types.uint64), generate


@intrinsic
def store_word(typing_context: Any, address: Any, word: Any) -> Any:
    """Write eight bytes from `address` on, which need not be aligned. The caller has checked that it may."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _place(builder, arguments[0]), align=1)
        return context.get_dummy_value()

    return void(types.uint64, types.uint64), generate


@intrinsic
def copy_memory(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes that do not overlap, by the C library's way. The caller has checked that they are there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of = (builder.inttoptr(each, ir.PointerType(ir.IntType(8))) for each in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return void(types.uint64, types.uint64, types.uint64), generate


@intrinsic
def leading_zeros(typing_context: Any, word: Any) -> Any:
    """How many of the highest bits of `word` are 0: 64 where all are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return uint64(types.uint64), generate


@intrinsic
def trailing_zeros(typing_context: Any, word: Any) -> Any:
    """How many of the lowest bits of `word` are 0: 64 where all are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return uint64(types.uint64), generate


@intrinsic
def set_bits(typing_context: Any, word: Any) -> Any:
    """How many bits of `word` are 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return uint64(types.uint64), generate


def _instruction(builder: Any, name: str, arguments: Any) -> Any:
    """A call of the processor's, of two words; 0 where DEPOSITS does not hold."""
    if not DEPOSITS:
        return ir.Constant(ir.IntType(64), 0)
    kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 2)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def deposited(typing_context: Any, word: Any, mask: Any) -> Any:
    """The lowest bits of `word`, in order, where `mask` has ones. Where DEPOSITS does not hold, 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _instruction(builder, "llvm.x86.bmi.pdep.64", arguments)

    return uint64(types.uint64, types.uint64), generate


@intrinsic
def extracted(typing_context: Any, word: Any, mask: Any) -> Any:
    """The bits of `word` where `mask` has ones, in order, as the lowest. Where DEPOSITS does not hold, 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _instruction(builder, "llvm.x86.bmi.pext.64", arguments)

    return uint64(types.uint64, types.uint64), generate


@intrinsic
def reversed_bits(typing_context: Any, word: Any) -> Any:
    """A word with its highest bit lowest, and so on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitreverse(arguments[0])

    return uint64(types.uint64), generate


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.uint64), generate


@njit(nogil=True)
def bytes_at(address: Any, size: Any) -> Any:
    """The `size` bytes from `address` on, uint8. The caller has checked that they are there, and keeps them there."""
    return carray(_pointer(uint64(address)), (size,), uint8)


@njit(nogil=True)
def words_at(address: Any, size: Any) -> Any:
    """As bytes_at, but words of eight bytes, uint64, which need not be aligned: loops over them become vector code."""
    return carray(_pointer(uint64(address)), (size,), uint64)
