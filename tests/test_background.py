"""How a process ends whose threads may still run; each case in a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, logging, sys, threading, time
from kvrail.runtime import background
atexit.register(lambda: print("interpreter's own end", flush=True))
begun = threading.Event()
def polite():
    begun.set()
    while not background.stopping():
        time.sleep(0.01)
    print("asked to stop", flush=True)
def stubborn():
    begun.set()
    while True:
        time.sleep(0.01)
logging.basicConfig(format="%(message)s")
background.start("work", {work})
begun.wait()
print("last words", end="")
logging.getLogger().warning("last line")
sys.exit(background.end({status}))
"""


def run(work: str, status: int) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(work=work, status=status)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("status", [0, 1])
def test_a_thread_that_looks_is_waited_for(status: int):
    done = run("polite", status)
    assert (done.returncode, done.stderr) == (status, "last line\n")
    assert done.stdout == "last wordsasked to stop\ninterpreter's own end\n"


@pytest.mark.parametrize("status", [0, 1])
def test_a_thread_that_cannot_be_asked_never_meets_the_interpreters_end(status: int):
    done = run("stubborn", status)
    assert (done.returncode, done.stderr, done.stdout) == (status, "last line\n", "last words")
