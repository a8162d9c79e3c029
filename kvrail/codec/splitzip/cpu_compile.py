"""What kernels for a CPU need of numba: to be compiled once, and an instruction that it does not offer."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import int64, njit, uint64
from numba.extending import intrinsic


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for one signature when its module is imported; keep it where README.md says.

    What is kept is found again by the function's file and by what the function closes over: a change of another file
    that it takes functions from goes unseen.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # numba found no directory for its cache, or the disk is full
            return njit(signature, nogil=True)(function)

    return decorate


@intrinsic
def trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Zero bits below the lowest one of a 64-bit word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return int64(uint64), generate
