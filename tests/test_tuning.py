"""Threads of a worker: only one has a team, so that a step's products start at once."""

import os
import subprocess
import sys

import pytest

from kvrail.tuning import in_passing_thread

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")

HEAD = """
import os, threading
import torch
from kvrail.tuning import compute_with, in_passing_thread

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    return float(torch.ones(1 << 20).add_(1).sum())  # enough for two threads

def in_helper(*calls):
    helper = threading.Thread(target=lambda: [call() for call in calls] + [done.set(), leave.wait()])
    done, leave = threading.Event(), threading.Event()
    helper.start()
    done.wait()
    count = threads()
    leave.set()
    helper.join()
    return count
"""


def run(code: str) -> list[str]:
    """What a process of two cores prints, in words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", HEAD + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_passing_thread_leaves_no_team() -> None:
    before, passed, stayed = map(
        int, run("print(threads(), in_passing_thread(compute) and threads(), compute() and threads())")
    )
    assert passed == before
    assert stayed == before + 1  # what would be left behind


def test_helpers_get_no_team_and_leave_the_engines_number() -> None:
    code = """
def team(*calls):
    return in_helper(*calls, compute) - in_helper(*calls)

def disturb():
    in_helper(lambda: compute_with(1))

print(team(lambda: compute_with(2)), team(lambda: compute_with(1)), team(lambda: compute_with(2), disturb))
"""
    assert run(code) == ["1", "0", "1"]


def test_a_passing_thread_passes_on_what_comes_of_it() -> None:
    assert in_passing_thread(lambda: 7) == 7
    with pytest.raises(KeyError, match="gone"):
        in_passing_thread(lambda: {}["gone"])
