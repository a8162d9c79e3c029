"""Words of 64 bits at any byte of memory, little-endian, for kernels on a CPU."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

from llvmlite import ir
from numba import types, uint64, void
from numba.extending import intrinsic


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(ir.IntType(64)))


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
