"""What kernels for a GPU need from the machine besides the GPU, tried when a worker starts, before its first kernel.

Triton compiles kernels by itself. Their launchers are C: the machine's compiler builds them when a process first needs
them. Triton's cache keeps them and they are loaded from there, so its file system must allow exec.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from kvrail.errors import ConfigError

COMPILERS = ("gcc", "clang")
"""Compilers in the order in which Triton looks for them where CC names none (triton/runtime/build.py)."""


def check_toolchain() -> None:
    """Make Triton build and load a kernel's launcher; does nothing without a GPU.

    Raises ConfigError, which names what is missing and the remedy, and OSError where the disk is full.
    """
    if not torch.cuda.is_available():
        return
    from triton import knobs
    from triton.runtime import driver

    try_build(lambda: driver.active, Path(knobs.cache.dir))


def try_build(build: Callable[[], object], cache: Path) -> None:
    """Look at the compiler and at Triton's cache folder, then `build`; raises as `check_toolchain` does."""
    compiler = _compiler()
    _check_cache(cache)
    try:
        build()
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"{compiler} cannot build what launches kernels (its messages are above): {error}; install libc's and "
            "Python's headers (Debian: libc6-dev, python3-dev)"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"what launches kernels was built and cannot be loaded: {error}; name a folder in TRITON_CACHE_DIR from "
            "which libraries may be loaded, and remove what another machine has left there"
        ) from error


def _compiler() -> str:
    named = os.environ.get("CC")
    found = [path for name in ([named] if named else COMPILERS) if (path := shutil.which(name))]
    if not found:
        where = f"CC is {named!r}, which is no program" if named else "neither gcc nor clang is on PATH"
        raise ConfigError(
            f"a GPU's kernels need a C compiler when the worker runs, and {where}; install gcc and libc6-dev (the "
            "image kvrail-worker-gpu has them), or name one in CC"
        )
    return found[0]


def _check_cache(cache: Path) -> None:
    remedy = "name a folder elsewhere in TRITON_CACHE_DIR"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise ConfigError(
            f"the folder of compiled kernels {cache} cannot be made: {error.strerror}; {remedy}"
        ) from None
    if not os.access(cache, os.W_OK):
        raise ConfigError(
            f"the folder of compiled kernels {cache} cannot be written; {remedy}, or give it to this user"
        )
    if os.statvfs(cache).f_flag & os.ST_NOEXEC:
        raise ConfigError(
            f"the folder of compiled kernels {cache} is on a file system mounted noexec, and they are loaded from it; "
            f"{remedy}, such as a volume, or mount it with exec"
        )
