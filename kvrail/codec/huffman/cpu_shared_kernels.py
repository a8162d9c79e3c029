"""Words of memory that several threads read and write, for kernels on a CPU."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, call-arg, var-annotated"

from typing import Any

from llvmlite import ir
from numba import int64, njit, uint64, void
from numba.core import cgutils

from kvrail.codec.core.cpu_compile import instruction

_WORD = ir.IntType(64)


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(_WORD))


@instruction(int64(uint64, int64))
def _add(builder: Any, address: Any, number: Any) -> Any:
    """Add to the word at `address`, which is aligned; what it was before."""
    return builder.atomic_rmw("add", _place(builder, address), number, "monotonic")


@instruction(int64(uint64))
def _load(builder: Any, address: Any) -> Any:
    """The word at `address`, and what its writer wrote before it."""
    return builder.load_atomic(_place(builder, address), "acquire", 8)


@instruction(void(uint64, int64))
def _store(builder: Any, address: Any, number: Any) -> None:
    """Write the word at `address`, after all that this thread wrote before."""
    builder.store_atomic(number, _place(builder, address), "release", 8)


@instruction(void())
def _give_way(builder: Any) -> None:
    """Let another thread have the core, if one waits for it."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), ()), "sched_yield")
    builder.call(function, ())


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
