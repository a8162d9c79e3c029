"""The lock on a cache of compiled kernels: its waits end, are logged, and save the second process the work."""

import fcntl
import os
import pickle
import subprocess
import sys
import time

import numba
import pytest

KERNEL = (
    "from kvrail.codec.core.cpu_compile import compiled\n@compiled('int64(int64)')\ndef twice(x):\n    return 2 * x\n"
)
LOADS = """
import logging, sys, time
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
from numba.core import dispatcher
from kvrail.codec.core import cpu_compile
cpu_compile.LOG_S, cpu_compile.MOST_WAIT_S = 0.2, float(sys.argv[2])
compile = dispatcher._FunctionCompiler.compile
def slow(*arguments):
    time.sleep(1.0)
    return compile(*arguments)
dispatcher._FunctionCompiler.compile = slow
sys.path.insert(0, sys.argv[1])
from kernel import twice
print("compiled:", sum(twice.stats.cache_misses.values()), flush=True)
sys.exit(twice(21) != 42)
"""
HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "wb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    """Starts processes that load or compile one kernel, which takes a second to compile."""
    (tmp_path / "kernel.py").write_text(KERNEL)
    started = []

    def one(most_wait_s=60.0):
        command = [sys.executable, "-c", LOADS, str(tmp_path), str(most_wait_s)]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield one
    for each in started:
        each.kill()
        each.communicate()


def said(process):
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    return text


def lock_of(tmp_path):
    """The lock file, once a process has made its cache's folder."""
    deadline = time.monotonic() + 60
    while not (found := list(tmp_path.glob("cache/*/compiling.lock"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def test_of_two_processes_one_compiles_and_says_so_and_the_other_loads(start):
    texts = [said(process) for process in [start(), start()]]
    assert sorted(text.splitlines()[-1] for text in texts) == ["compiled: 0", "compiled: 1"], texts
    assert any("compiling kernel twice, 0 s so far" in text for text in texts)


def test_a_wait_is_logged_and_ends_with_the_process_that_holds_the_lock(start, tmp_path):
    said(start())
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, lock_of(tmp_path)], stdout=subprocess.PIPE)
    holder.stdout.readline()
    waiting = start()
    assert waiting.stdout.readline() == "kernel twice: waiting for another process that compiles, 0 s so far\n"
    holder.kill()
    holder.communicate()
    assert "compiled: 0" in said(waiting)


def test_a_process_that_never_gives_the_lock_back_is_not_waited_for_for_ever(start, tmp_path):
    said(start())
    with lock_of(tmp_path).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = said(start(most_wait_s=0.5))
    assert "another process still compiles after" in text and "compiled: 0" in text


def test_a_kernel_that_another_version_kept_with_types_that_are_gone_is_compiled_again(start, tmp_path):
    said(start())
    (index,) = tmp_path.glob("cache/*/*.nbi")
    index.write_bytes(pickle.dumps(numba.__version__) + b"ckernel_of_old\nGeometry\n.")
    assert "compiled: 1" in said(start())
    assert "compiled: 0" in said(start())


TAKES_IN = """
import sys
sys.path.insert(0, sys.argv[1])
from package.kernel import twice
print("compiled:", sum(twice.stats.cache_misses.values()), "gives:", twice(21))
"""


def test_a_kept_kernel_is_compiled_again_when_a_file_that_it_takes_from_changes(tmp_path):
    """Of a function's file, and of one that only gives the function a number."""
    files = {
        "__init__": "",
        "numbers": "FACTOR = 2\n",
        "inner": "import numba\nfrom package.numbers import FACTOR\n"
        "@numba.njit\ndef times(x):\n    return FACTOR * x\n",
        "kernel": KERNEL.replace("    return 2 * x", "    return times(x)").replace(
            "import compiled\n", "import compiled\nfrom package.inner import times\n"
        ),
    }

    def run(**changed):
        (tmp_path / "package").mkdir(exist_ok=True)
        for name, text in (changed or files).items():
            (tmp_path / "package" / f"{name}.py").write_text(text)
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", TAKES_IN, str(tmp_path)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert run() == "compiled: 1 gives: 42\n"
    assert run(__init__="") == "compiled: 0 gives: 42\n"
    assert run(numbers="FACTOR = 3\n") == "compiled: 1 gives: 63\n"
    assert run(inner=files["inner"].replace("* x", "* x + 1")) == "compiled: 1 gives: 64\n"


def test_what_is_needed_later_is_compiled_when_it_is_needed(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL.replace("compiled", "compiled_when_needed"))
    script = """
import sys
from pathlib import Path
from kvrail.codec.core.cpu_compile import compile_now
sys.path.insert(0, sys.argv[1])
import kernel
kept = lambda: len(list(Path(sys.argv[1]).glob("cache/*/*.nbi")))
print(kept(), end=" ")
compile_now(kernel)
print(kept(), kernel.twice(21))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    found = subprocess.run(
        [sys.executable, "-c", script, tmp_path], env=environment, check=True, capture_output=True, text=True
    )
    assert found.stdout == "0 1 42\n"
