"""What kernels for a CPU need of numba: to be compiled once, and an instruction that it does not offer."""

import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from llvmlite import ir
from numba import int64, njit, uint64
from numba.extending import intrinsic

from kvrail.codec.core import compile_lock

logger = logging.getLogger("kvrail.codecs")


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for one signature when its module is imported; keep it where kvrail/codec/README.md says.

    What is kept is found again by the function's file and by what the function closes over: a change of another file
    that it takes functions from is seen where it closes over `version_of` that.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            kernel = _kept(function)
            kernel.compile(signature)
            kernel.disable_compile()
        except (RuntimeError, OSError) as error:  # numba found no directory for its cache, or the disk is full
            _tell_once(str(error).partition(": ")[0].partition(" '")[0])
            return njit(signature, nogil=True)(function)
        return kernel

    return decorate


def compiled_when_called(function: Callable[..., Any]) -> Any:
    """Compile a function for the types of each call; keep it as `compiled` does where there is a folder for that."""
    try:
        return _kept(function)
    except RuntimeError:  # numba found no directory for its cache
        return njit(nogil=True)(function)


def _kept(function: Callable[..., Any]) -> Any:
    """A kernel that is loaded from numba's cache, or compiled and kept there by one process at a time."""
    kernel: Any = njit(nogil=True, cache=True)(function)
    lock = Path(kernel.stats.cache_path) / compile_lock.NAME
    load_or_compile = kernel.compile

    def compile_alone(signature: Any) -> Any:
        with compile_lock.held(lock, function.__name__):
            return load_or_compile(signature)

    kernel.compile = compile_alone
    return kernel


def version_of(*modules: ModuleType) -> int:
    """A number that another text of the modules' files changes."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in modules))


@functools.cache
def _tell_once(why: str) -> None:
    logger.warning("kernels are compiled at every start (%s); name a folder in NUMBA_CACHE_DIR to keep them", why)


@intrinsic
def trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Zero bits below the lowest one of a 64-bit word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return int64(uint64), generate
