"""Words of memory that several threads read and write, for kernels on a CPU."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, call-arg, var-annotated"

from typing import Any

from llvmlite import ir
from numba import int64, njit, types, uint64, void
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = ir.IntType(64)


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(_WORD))


@intrinsic
def _add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the word at `address`, which is aligned; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _place(builder, arguments[0]), arguments[1], "monotonic")

    return types.int64(types.uint64, types.int64), generate


@intrinsic
def _load(typing_context: Any, address: Any) -> Any:
    """The word at `address`, and what its writer wrote before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_place(builder, arguments[0]), "acquire", 8)

    return types.int64(types.uint64), generate


@intrinsic
def _store(typing_context: Any, address: Any, number: Any) -> Any:
    """Write the word at `address`, after all that this thread wrote before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _place(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return void(types.uint64, types.int64), generate


@intrinsic
def _give_way(typing_context: Any) -> Any:
    """Let another thread have the core, if one waits for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), ()), "sched_yield")
        builder.call(function, ())
        return context.get_dummy_value()

    return void(), generate


@njit(nogil=True)
def take(numbers):
    """The next number that no other thread has taken: numbers, int64 [1], counts them."""
    return _add(uint64(numbers.ctypes.data), int64(1))


@njit(nogil=True)
def stop_all(numbers, stop):
    """Let no thread take a number below `stop` any more."""
    _store(uint64(numbers.ctypes.data), int64(stop))


@njit(nogil=True)
def is_known(places, index):
    """Whether a thread has published places[index], int64, which was -1 before."""
    return _load(uint64(places.ctypes.data) + uint64(8 * index)) >= 0


@njit(nogil=True)
def wait_for(places, index):
    """places[index], once a thread has published it."""
    address = uint64(places.ctypes.data) + uint64(8 * index)
    found = _load(address)
    while found < 0:
        _give_way()
        found = _load(address)
    return found


@njit(nogil=True)
def publish(places, index, place):
    """Write places[index] for all threads."""
    _store(uint64(places.ctypes.data) + uint64(8 * index), int64(place))
