"""Folders of one run of the tests, removed at its end."""

import functools
import shutil
import tempfile
from pathlib import Path


@functools.cache
def _root() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvrail-tests-"))


def new_folder(name: str) -> Path:
    """An empty folder that no other test has."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root()))


def remove_all() -> None:
    """Remove all folders."""
    shutil.rmtree(_root())
