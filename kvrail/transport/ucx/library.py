"""Loads UCXX, and says why it cannot be used. Everything of UCXX is reached through `load`."""

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrail.errors import ConfigError

EXTRA = "pip install 'kvrail[ucx]'"
PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
_BEFORE_LOADING = {"UCX_MEMTYPE_CACHE": "n", "UCX_WARN_UNUSED_ENV_VARS": "n"}
"""What UCX reads only while its library is loaded. Its cache of memory types knows no CUDA memory that was allocated
before, and would take it for the host's."""


@dataclass(frozen=True, slots=True)
class Library:
    """UCXX's bindings, and the error that all of its errors derive from."""

    api: Any
    array: Any
    error: type[Exception]
    truncated: type[Exception]


def available() -> str:
    """Why the transport `ucx` cannot be started here; empty where it can."""
    try:
        load()
    except ConfigError as error:
        return str(error)
    return ""


def prefers_system() -> bool:
    """Whether the environment asks for a UCX of the system in place of the wheel's, which has no verbs."""
    return os.environ.get(PREFER_SYSTEM, "false").lower() != "false"


@functools.cache
def load() -> Library:
    """UCXX, loaded once. Raises ConfigError where it is absent, incomplete or took a UCX that was not asked for."""
    if importlib.util.find_spec("ucxx") is None:
        raise ConfigError(f"transport 'ucx' needs UCXX, which is not installed; {EXTRA}, or use --transport tcp")
    system = prefers_system()
    # UCXX loads librmm and libucx in one attempt. Where either is missing it takes a UCX of the system without a word.
    missing = [name for name in ("librmm", "libucx") if importlib.util.find_spec(name) is None]
    if missing and not system:
        raise ConfigError(
            f"UCXX is incomplete: {' and '.join(missing)} missing; {EXTRA}, or set {PREFER_SYSTEM}=true to use the"
            " system's UCX"
        )
    try:
        with _environment_restored():
            api = importlib.import_module("ucxx._lib.libucxx")
            array = importlib.import_module("ucxx._lib.arr").Array
    except (ImportError, OSError) as error:
        raise ConfigError(f"UCXX does not load: {error}; {EXTRA}, or use --transport tcp") from error
    _check_origin(system=system)
    return Library(api, array, api.UCXError, api.UCXMessageTruncatedError)


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Set what UCX reads while it is loaded; afterwards undo that and what UCXX's import sets, for our children's sake.

    What UCXX sets is for contexts made later; the transport's own are configured by its settings.
    """
    before = dict(os.environ)
    for name, value in _BEFORE_LOADING.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            if name.startswith("UCX_"):
                del os.environ[name]


def _check_origin(*, system: bool) -> None:
    """Raise ConfigError where this process took another UCX than it was to: the one beside UCXX, or the system's."""
    spec = importlib.util.find_spec("libucx")
    folder = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in maps if "libucp.so" in line}
    bundled = {path for path in mapped if folder is not None and Path(path).resolve().is_relative_to(folder)}
    if system and bundled:
        raise ConfigError(
            f"{PREFER_SYSTEM} asks for the system's UCX, but {', '.join(sorted(bundled))} was loaded; libucp.so,"
            " libuct.so, libucs.so, libucm.so and libucs_signal.so, by these names, must be in LD_LIBRARY_PATH"
        )
    if not system and (mapped - bundled or not mapped):
        raise ConfigError(
            f"UCX was loaded from {', '.join(sorted(mapped - bundled)) or 'nowhere'}, not from {folder}; remove that"
            f" one from LD_LIBRARY_PATH, or set {PREFER_SYSTEM}=true to mean it"
        )
