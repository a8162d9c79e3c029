"""Threads of a worker: only one has a team, so that a step's products start at once."""

import os
import subprocess
import sys

import pytest

from kvrail.runtime.tuning import in_passing_thread

COUNTED = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")


def run(code: str) -> list[str]:
    """What a process of two cores prints, in words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@COUNTED
def test_a_passing_thread_leaves_no_team() -> None:
    code = """
import os, time
import torch
from kvrail.runtime.tuning import in_passing_thread

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    return torch.ones(1 << 20).add_(1)  # enough for two threads

before, deadline = threads(), time.monotonic() + 60
in_passing_thread(compute)
while threads() > before and time.monotonic() < deadline:  # those of a team end after the thread that had it
    time.sleep(0.05)
passed = threads()
compute()
print(passed - before, threads() - before)
"""
    assert run(code) == ["0", "1"]  # the last is what would be left behind


def test_a_helper_computes_alone_and_leaves_the_engines_number() -> None:
    code = """
import threading
import torch
from kvrail.runtime.tuning import compute_with

def in_thread(*calls):
    thread = threading.Thread(target=lambda: [call() for call in calls])
    thread.start()
    thread.join()

def number():
    print(torch.get_num_threads())

def helper():
    in_thread(lambda: compute_with(1), number)

in_thread(lambda: compute_with(2), helper, number)
"""
    assert run(code) == ["1", "2"]


def test_a_passing_thread_passes_on_what_comes_of_it() -> None:
    assert in_passing_thread(lambda: 7) == 7
    with pytest.raises(KeyError, match="gone"):
        in_passing_thread(lambda: {}["gone"])
