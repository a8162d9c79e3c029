"""What a worker on a GPU says at its start where kernels could not be built or loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrail.engine.model import toolchain
from kvrail.engine.model.toolchain import try_build
from kvrail.errors import ConfigError


def load(path: Path) -> None:
    """As Triton loads what it has built."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("built", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A program that stands for a compiler."""
    program = tmp_path / "cc"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    return program


@pytest.mark.parametrize(("cc", "named"), [(None, "neither gcc nor clang"), ("/nowhere/cc", "'/nowhere/cc'")])
def test_without_a_compiler(cc, named, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", cc) if cc else monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match=named) as raised:
        try_build(lambda: pytest.fail("was built all the same"), tmp_path / "cache")
    assert "install gcc and libc6-dev" in str(raised.value)


def test_a_compiler_that_fails(compiler, tmp_path):
    with pytest.raises(ConfigError, match="libc6-dev, python3-dev"):
        try_build(lambda: subprocess.run([compiler], check=True), tmp_path / "cache")


def test_a_library_that_cannot_be_loaded(compiler, tmp_path):
    library = tmp_path / "built.so"
    library.write_bytes(b"of another machine")
    with pytest.raises(ConfigError, match="TRITON_CACHE_DIR"):
        try_build(lambda: load(library), tmp_path / "cache")


def test_a_cache_that_may_not_be_loaded_from(compiler, tmp_path, monkeypatch):
    flags = os.statvfs(tmp_path)
    told = os.statvfs_result([*flags[:8], flags.f_flag | os.ST_NOEXEC, *flags[9:]])
    monkeypatch.setattr(os, "statvfs", lambda path: told)
    with pytest.raises(ConfigError, match=r"mounted noexec.*TRITON_CACHE_DIR"):
        try_build(lambda: None, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ConfigError, match="cannot be written"):
        try_build(lambda: None, tmp_path / "cache")


def test_where_all_is_there_it_is_built_once(compiler, tmp_path):
    built = []
    try_build(lambda: built.append(1), tmp_path / "cache")
    assert built == [1]
    assert (tmp_path / "cache").is_dir()


def test_triton_has_what_is_asked_of_it():
    """The names that `check_toolchain` uses, in the version that is installed."""
    script = """
from triton import knobs
from triton.runtime import driver
print(knobs.cache.dir, hasattr(type(driver), "active"))
"""
    environment = os.environ | {"TRITON_CACHE_DIR": "/somewhere"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["/somewhere", "True"]


def test_without_a_gpu_nothing_is_tried(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(toolchain, "try_build", lambda *_: pytest.fail("tried"))
    toolchain.check_toolchain()
