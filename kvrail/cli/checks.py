"""What a worker's settings name, looked at before torch is imported, which takes seconds.

What only the model or a codec's own code can tell is checked later, by the worker.
"""

import difflib
import importlib
import os
from pathlib import Path
from typing import Any

from kvrail.config.memory import check_page_memory
from kvrail.config.origins import flag_name
from kvrail.config.settings import DEMO_MODEL, DecodeSettings, WorkerSettings
from kvrail.errors import ConfigError

AUTO = "auto"


def check_worker(settings: WorkerSettings) -> None:
    """Raise ConfigError where memory for pages, the codebook's file or the codec cannot be had or is not allowed."""
    check_page_memory(settings, flag_name("kv_memory_gib"))
    if settings.codebook:
        check_readable(flag_name("codebook"), Path(settings.codebook), "name a file that kvrail calibrate has written")
    if isinstance(settings, DecodeSettings) and settings.codec != AUTO:
        codec = settings.codec
        check_codec(flag_name("codec"), codec, f"{AUTO} or ")
        if codec not in lossy_codecs() or settings.allow_lossy:
            return
        exact = ", ".join(each for each in _registry().names() if each not in lossy_codecs())
        raise ConfigError(
            f"{flag_name('codec')}: codec {codec!r} is lossy: it does not restore every bit of the KV; choose one of"
            f" {exact}, or add {flag_name('allow_lossy')}"
        )


def check_codec(flag: str, name: str, others: str = "") -> None:
    """Raise ConfigError where no codec is called `name`, given as `flag`; others: what else may be chosen."""
    known: tuple[str, ...] = _registry().names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose {others}one of {', '.join(known)}"
        raise ConfigError(f"{flag}: codec {name!r} is unknown; {remedy}")


def lossy_codecs() -> tuple[str, ...]:
    """Names of the codecs that do not restore every bit."""
    registry = _registry()
    return tuple(name for name in registry.names() if not registry.info(name).exact)


def _registry() -> Any:
    return importlib.import_module("kvrail.codec.registry")  # the one module there that is free of torch


def check_model(model: str) -> None:
    """Raise ConfigError where `model` is a path without a model; a name of the Hub is taken as it is."""
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model: {model} has no config.json; name a folder with the model's files")
        return
    if not (folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1):
        return
    remedy = "name a folder with the model's files, or a Hub name such as Qwen/Qwen3-0.6B"
    if model == DEMO_MODEL:
        raise ConfigError(
            "--model: none was named, and the demo model is no part of the installed package; unpack a release's"
            f" kvrail-demo.tar.gz (docs/quick-start.md) and add --model kvrail-demo, or {remedy}"
        )
    raise ConfigError(f"--model: there is no folder {model}; {remedy}")


def check_readable(flag: str, path: Path, remedy: str) -> None:
    """Raise ConfigError where `path`, given as `flag`, is no file that can be read."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; {remedy}") from None


def check_writable(flag: str, path: Path, *, force: bool) -> None:
    """Raise ConfigError where a file cannot be written at `path`, given as `flag`. force: it may be overwritten."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{flag} {path} is no file in a folder that exists; name one")
    if path.exists() and not force:
        raise ConfigError(f"{flag} {path} exists already; add --force to overwrite it, or name another file")
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; name a file that can be written") from None
