"""Words of 64 bits at any byte of memory, little-endian, for kernels on a CPU."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type"
# mypy: disable-error-code="call-arg, call-overload, attr-defined"

from typing import Any

from llvmlite import binding, ir
from numba import carray, njit, types, uint8, uint64, void
from numba.core import cgutils, config

from kvrail.codec.core.cpu_compile import instruction


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


@instruction(uint64(uint64))
def load_word(builder: Any, address: Any) -> Any:
    """The eight bytes from `address` on, which need not be aligned. The caller has checked that they may be read."""
    return builder.load(_place(builder, address), align=1)


@instruction(void(uint64, uint64))
def store_word(builder: Any, address: Any, word: Any) -> None:
    """Write eight bytes from `address` on, which need not be aligned. The caller has checked that it may."""
    builder.store(word, _place(builder, address), align=1)


@instruction(void(uint64, uint64, uint64))
def copy_memory(builder: Any, target: Any, source: Any, size: Any) -> None:
    """Copy `size` bytes that do not overlap, by the C library's way. The caller has checked that they are there."""
    to, of = (builder.inttoptr(each, ir.PointerType(ir.IntType(8))) for each in (target, source))
    cgutils.raw_memcpy(builder, to, of, size, 1)


@instruction(uint64(uint64))
def leading_zeros(builder: Any, word: Any) -> Any:
    """How many of the highest bits of `word` are 0: 64 where all are."""
    return builder.ctlz(word, ir.Constant(ir.IntType(1), 0))


@instruction(uint64(uint64))
def trailing_zeros(builder: Any, word: Any) -> Any:
    """How many of the lowest bits of `word` are 0: 64 where all are."""
    return builder.cttz(word, ir.Constant(ir.IntType(1), 0))


@instruction(uint64(uint64))
def set_bits(builder: Any, word: Any) -> Any:
    """How many bits of `word` are 1."""
    return builder.ctpop(word)


def _instruction(builder: Any, name: str, arguments: Any) -> Any:
    """A call of the processor's, of two words; 0 where DEPOSITS does not hold."""
    if not DEPOSITS:
        return ir.Constant(ir.IntType(64), 0)
    kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 2)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@instruction(uint64(uint64, uint64))
def deposited(builder: Any, word: Any, mask: Any) -> Any:
    """The lowest bits of `word`, in order, where `mask` has ones. Where DEPOSITS does not hold, 0."""
    return _instruction(builder, "llvm.x86.bmi.pdep.64", (word, mask))


@instruction(uint64(uint64, uint64))
def extracted(builder: Any, word: Any, mask: Any) -> Any:
    """The bits of `word` where `mask` has ones, in order, as the lowest. Where DEPOSITS does not hold, 0."""
    return _instruction(builder, "llvm.x86.bmi.pext.64", (word, mask))


@instruction(uint64(uint64))
def reversed_bits(builder: Any, word: Any) -> Any:
    """A word with its highest bit lowest, and so on."""
    return builder.bitreverse(word)


@instruction(types.voidptr(uint64))
def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(ir.IntType(8)))


@njit(nogil=True)
def bytes_at(address: Any, size: Any) -> Any:
    """The `size` bytes from `address` on, uint8. The caller has checked that they are there, and keeps them there."""
    return carray(_pointer(uint64(address)), (size,), uint8)


@njit(nogil=True)
def words_at(address: Any, size: Any) -> Any:
    """As bytes_at, but words of eight bytes, uint64, which need not be aligned: loops over them become vector code."""
    return carray(_pointer(uint64(address)), (size,), uint64)
