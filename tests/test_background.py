"""How a process ends whose threads may still run; each case in a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, logging, sys, threading, time
from kvrail.runtime import background
from concurrent.futures import ThreadPoolExecutor
class Freed:
    def __del__(self):
        print("freed", flush=True)
kept = Freed()
atexit.register(lambda: print("what was registered"))
begun = threading.Event()
def polite():
    begun.set()
    while not background.stopping():
        time.sleep(0.01)
    print("asked to stop", flush=True)
    ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.2), print("what was submitted")))
def stubborn():
    begun.set()
    while True:
        time.sleep(0.01)
logging.basicConfig(format="%(message)s")
background.start("work", {work})
begun.wait()
print("last words", end="")
logging.getLogger().warning("last line")
background.end({status})
"""


def run(work: str, status: int) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(work=work, status=status)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("status", [0, 1])
def test_a_thread_that_looks_is_waited_for(status: int):
    done = run("polite", status)
    assert (done.returncode, done.stderr) == (status, "last line\n")
    assert done.stdout == "last wordsasked to stop\nwhat was submitted\nwhat was registered\n"


@pytest.mark.parametrize("status", [0, 1])
def test_a_thread_that_cannot_be_asked_never_meets_the_interpreters_end(status: int):
    done = run("stubborn", status)
    assert (done.returncode, done.stderr, done.stdout) == (status, "last line\n", "last words")
