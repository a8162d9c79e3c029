"""What a wheel holds, and that it works where nothing else of the checkout is."""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from kvrail.cli.up import FIRST_CHAT

ROOT = Path(__file__).parents[2]
FALLBACK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["fallback_version"]
MOST_BYTES = 8 << 20
START_S = 300.0

SMALL = ("--kv-memory-gib", "0.25")
"""Other tests' clusters run beside this one."""


def tracked(*paths):
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, check=True, text=True)
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the working tree, built as an image builds it: from the files alone, without git."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for path in [*tracked("kvrail"), *(Path(name) for name in ("pyproject.toml", "README.md", "LICENSE"))]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_our_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = file.read(f"kvrail-{FALLBACK}.dist-info/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"kvrail", f"kvrail-{FALLBACK}.dist-info"}
    ours = {name for name in names if name.startswith("kvrail/")}
    # Pages about the code stay with the code; all else that the checkout has is there.
    assert ours == {str(path) for path in tracked("kvrail") if path.suffix != ".md"}
    assert "kvrail/py.typed" in ours
    assert wheel.stat().st_size < MOST_BYTES
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE))
    assert {"worker", "codec", "ucx", "otel"} <= extras
    required = re.findall(r"^Requires-Dist: ([a-z0-9-]+)[^;\n]*(;.*)?$", metadata, re.MULTILINE)
    assert not {name for name, when in required if "extra" not in when} & {"torch", "numpy", "transformers", "numba"}


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def pip(environment, *arguments):
    """pip, of the tests, on another environment; what it prints."""
    done = run(sys.executable, "-m", "pip", "--python", environment / "bin" / "python", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def asked_for(one, extras):
    """The installed distributions that one with these extras asks for, with what they ask for, by name and extras."""
    found, todo = {}, [(one, extras)]
    while todo:
        one, extras = todo.pop()
        for line in one.requires or ():
            wanted = Requirement(line)
            asked = (wanted.name, frozenset(wanted.extras))
            applies = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if applies and asked not in found:
                found[asked] = importlib.metadata.distribution(wanted.name)
                todo.append((found[asked], wanted.extras))
    return found


def link(target, place):
    """Show a file or folder at a place too; two folders there become one."""
    if not place.exists():
        place.symlink_to(target)
    elif target.is_dir() and place.resolve() != target.resolve():
        if place.is_symlink():
            first = place.resolve()
            place.unlink()
            place.mkdir()
            for child in first.iterdir():
                link(child, place / child.name)
        for child in target.iterdir():
            link(child, place / child.name)


def test_the_wheel_serves_with_no_more_than_it_asks_for(wheel, tmp_path):
    """Nothing is downloaded: the packages are those beside the tests, less those that the wheel does not ask for."""
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (about,) = importlib.metadata.distributions(path=[str(wheel)])
    for one in asked_for(about, {"worker"}).values():
        for top in {path.parts[0] for path in one.files} - {"..", "__pycache__"}:
            link(Path(one.locate_file(top)), packages / top)
    pip(tmp_path / "venv", "install", "--quiet", "--no-index", "--no-deps", wheel)
    take_kernels(packages)
    check_that_it_serves(tmp_path)


def take_kernels(packages):
    """What numba has compiled of the checkout's files serves the same files elsewhere.

    It knows a file by its time and size, and compiles anew what it does not know, which takes longer.
    """
    for path in tracked("kvrail"):
        place = packages / path
        if path.suffix == ".py" and place.read_bytes() == (ROOT / path).read_bytes():
            shutil.copystat(ROOT / path, place)
            for kept in (ROOT / path.parent / "__pycache__").glob(f"{path.stem}.*.nb?"):
                (place.parent / "__pycache__").mkdir(exist_ok=True)
                shutil.copy(kept, place.parent / "__pycache__")


@pytest.mark.wheel
@pytest.mark.timeout(1800)
def test_the_wheel_serves_from_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv")
    pip(tmp_path / "venv", "install", "-c", ROOT / "constraints-cpu.txt", f"kvrail[worker] @ {wheel.as_uri()}")
    check_that_it_serves(tmp_path)


def check_that_it_serves(folder):
    """The environment in `folder` is whole, and a cluster with the demo model runs from it, outside the checkout."""
    bin, home = folder / "venv" / "bin", folder / "home"
    home.mkdir()
    assert pip(folder / "venv", "check") == "No broken requirements found.\n"
    code = "import kvrail, sys; print(kvrail.__file__, kvrail.__version__)"
    file, version = run(bin / "python", "-c", code, cwd=home).stdout.split()
    assert Path(file).is_relative_to(folder / "venv")
    assert version == FALLBACK
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HOME": str(home)}
    without = run(bin / "kvrail", "up", "--port", "0", cwd=home, env=environment)
    assert (without.returncode, without.stderr.count("\n")) == (2, 1)
    assert "unpack a release's kvrail-demo.tar.gz" in without.stderr
    shutil.copytree(ROOT / "models" / "kvrail-demo", home / "kvrail-demo")
    ask_a_cluster([bin / "kvrail", "up", "--port", "0", "--model", "kvrail-demo", *SMALL], home, environment)


def ask_a_cluster(command, folder, environment):
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(list(map(str, command)), cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while "Ctrl-C stops the cluster." not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        url = re.search(r"kvrail chat --url (\S+)", log.read_text())[1]
        body = {"model": "kvrail-demo", "temperature": 0, "messages": FIRST_CHAT}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert "grep" in answer.json()["choices"][0]["message"]["content"], json.dumps(answer.json())
        assert answer.json()["usage"]["kvrail"]["kv_bytes"] > 0
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
