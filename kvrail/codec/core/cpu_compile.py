"""Kernels for a CPU, compiled by numba once and kept, and instructions that numba does not offer.

The workers of one machine start together and need the same kernels. One process at a time compiles those of a cache
folder; the others wait until a kernel is kept, and load it. The lock is a file's (flock), so it ends with the process
that holds it. What is compiled, or waited for, is logged.
"""

import fcntl
import functools
import inspect
import logging
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from llvmlite import ir
from numba import int64, njit, uint64
from numba.core import event as events
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

logger = logging.getLogger("kvrail.codecs")

LOCK = "compiling.lock"
LOG_S = 3.0
"""Seconds between two log lines of a compilation or a wait; shorter ones are not logged."""
MOST_WAIT_S = 300.0
"""Longest wait for another process, which may be stopped; afterwards this one compiles for itself."""
_POLL_S = 0.05


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for one signature when its module is imported; keep it where kvrail/codec/README.md says."""

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


def compiled_when_needed(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Like `compiled`, but at the first call, or before it by `compile_now`: other kernels of the file do not wait."""

    def decorate(function: Callable[..., Any]) -> Any:
        kept = functools.cache(lambda: compiled(signature)(function))

        @functools.wraps(function)
        def kernel(*arguments: Any) -> Any:
            return kept()(*arguments)

        kernel.compile_now = kept  # type: ignore[attr-defined]
        return kernel

    return decorate


def compile_now(module: ModuleType) -> None:
    """Compile what is `compiled_when_needed` of a module, before a request waits for it."""
    for kernel in vars(module).values():
        if compile_it := getattr(kernel, "compile_now", None):
            compile_it()


def compiled_when_called(function: Callable[..., Any]) -> Any:
    """Compile a function for the types of each call; keep it as `compiled` does where there is a folder for that."""
    try:
        return _kept(function)
    except RuntimeError:  # numba found no directory for its cache
        return njit(nogil=True)(function)


def _kept(function: Callable[..., Any]) -> Any:
    """A kernel that is loaded from numba's cache, or compiled and kept there by one process at a time.

    numba finds it again by the function's own file. Here the files count, too, from which that takes what it uses.
    """
    kernel: Any = njit(nogil=True, cache=True)(function)
    key_of, version = kernel._cache._index_key, _version(function)
    kernel._cache._index_key = lambda *given: (*key_of(*given), version)
    folder = Path(kernel.stats.cache_path)
    load_or_compile = kernel.compile

    def compile_alone(signature: Any) -> Any:
        with _alone(folder / LOCK, function.__name__):
            try:
                return load_or_compile(signature)
            except (ImportError, AttributeError):  # kept by another version, with types that are gone
                for index in folder.glob(f"*{function.__name__}-*.nbi"):
                    index.unlink(missing_ok=True)
                return load_or_compile(signature)

    kernel.compile = compile_alone
    return kernel


@contextmanager
def _alone(path: Path, kernel: str) -> Iterator[None]:
    """Hold the lock file `path` during the block, which loads or compiles `kernel`.

    Kernels that the block compiles on the way are under the same lock. Where the folder takes no lock, the block runs
    without.
    """
    if global_compiler_lock.is_locked():  # type: ignore[no-untyped-call]
        yield
        return
    with global_compiler_lock:  # before the file's: threads of this process take them in one order
        file = _opened(path)
        if file is None:
            yield
            return
        with file:
            _wait_for(file, kernel)
            yield


def _opened(path: Path) -> IO[bytes] | None:
    try:
        return path.open("wb")
    except OSError:
        return None


def _wait_for(file: IO[bytes], kernel: str) -> None:
    begin = logged = time.monotonic()
    while not _locked(file):
        now = time.monotonic()
        if now - begin > MOST_WAIT_S:
            logger.warning("kernel %s: another process still compiles after %.0f s; not waiting", kernel, now - begin)
            return
        if now - logged > LOG_S:
            logged = now
            logger.info("kernel %s: waiting for another process that compiles, %.0f s so far", kernel, now - begin)
        time.sleep(_POLL_S)


def _locked(file: IO[bytes]) -> bool:
    """Whether the wait is over: this process has the lock now, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class _Compilations(events.Listener):
    """Logs what numba compiles and for how long already. One thread at a time compiles: numba sees to that."""

    def __init__(self) -> None:
        self._depth = 0
        self._done = threading.Event()

    def on_start(self, event: events.Event) -> None:
        """Log from now on, unless this kernel is part of one that is logged."""
        self._depth += 1
        if self._depth == 1:
            self._done = threading.Event()
            name = event.data["dispatcher"].py_func.__name__
            threading.Thread(target=_log, args=(name, self._done), name="compiling", daemon=True).start()

    def on_end(self, event: events.Event) -> None:
        """Log no more once the outermost kernel is compiled."""
        self._depth -= 1
        if self._depth == 0:
            self._done.set()


def _log(kernel: str, done: threading.Event) -> None:
    begin = time.monotonic()
    while not done.wait(LOG_S):
        logger.info("compiling kernel %s, %.0f s so far", kernel, time.monotonic() - begin)


events.register("numba:compile", _Compilations())  # type: ignore[no-untyped-call]


def _version(function: Callable[..., Any]) -> int:
    """A number that changes with what a kernel takes from other files.

    That is the text of those whose functions or types it, or a kernel in it, takes in, and numbers of any.
    """
    root, texts, scopes = function.__module__.partition(".")[0] + ".", {}, [function.__globals__]
    for scope in scopes:  # which grow
        for name, value in scope.items():
            owner = str(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", ""))
            if isinstance(value, Number):
                texts[f"{scope['__name__']}.{name}"] = repr(value).encode()
            elif owner.startswith(root) and owner not in texts:
                module = sys.modules[owner]
                texts[owner] = Path(str(module.__file__)).read_bytes()
                if any(hasattr(each, "py_func") for each in vars(module).values()):
                    scopes.append(vars(module))
    return zlib.crc32(b"".join(texts[name] for name in sorted(texts)))


@functools.cache
def _tell_once(why: str) -> None:
    logger.warning("kernels are compiled at every start (%s); name a folder in NUMBA_CACHE_DIR to keep them", why)


def instruction(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make of a function, which writes LLVM's instructions, one that kernels call with this signature.

    It gets LLVM's builder and the arguments' values, and gives a value where the signature has one.
    """

    def decorate(build: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            found = build(builder, *arguments)
            return context.get_dummy_value() if found is None else found

        def called(typing_context: Any, *arguments: Any) -> Any:
            return signature, generate

        called.__name__, called.__module__, called.__doc__ = build.__name__, build.__module__, build.__doc__
        called.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]  # numba counts by it
        return intrinsic(called)

    return decorate


@instruction(int64(uint64))
def trailing_zeros(builder: Any, word: Any) -> Any:
    """Zero bits below the lowest one of a 64-bit word that is not 0."""
    return builder.cttz(word, ir.Constant(ir.IntType(1), 1))
