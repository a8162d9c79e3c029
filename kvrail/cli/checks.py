"""What a worker's settings name, looked at before torch is imported, which takes seconds.

What only the model or a codec's own code can tell is checked later, by the worker.
"""

import difflib
import importlib
import os
from pathlib import Path

from kvrail.config.settings import DEMO_MODEL, DecodeSettings, WorkerSettings, flag_name
from kvrail.errors import ConfigError

AUTO = "auto"


def check_worker(settings: WorkerSettings) -> None:
    """Raise ConfigError where the codebook's file cannot be read, or the codec is unknown or not allowed."""
    if settings.codebook:
        check_readable(flag_name("codebook"), Path(settings.codebook), "name a file that kvrail calibrate has written")
    if isinstance(settings, DecodeSettings) and settings.codec != AUTO:
        _check_codec(settings.codec, allow_lossy=settings.allow_lossy)


def _check_codec(name: str, *, allow_lossy: bool) -> None:
    registry = importlib.import_module("kvrail.codec.registry")  # the one module there that is free of torch
    known: tuple[str, ...] = registry.names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose {AUTO} or one of {', '.join(known)}"
        raise ConfigError(f"{flag_name('codec')}: codec {name!r} is unknown; {remedy}")
    if not registry.info(name).exact and not allow_lossy:
        exact = ", ".join(each for each in known if registry.info(each).exact)
        raise ConfigError(
            f"{flag_name('codec')}: codec {name!r} is lossy: it does not restore every bit of the KV; choose one of"
            f" {exact}, or add {flag_name('allow_lossy')}"
        )


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
