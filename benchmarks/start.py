"""Time that `kvrail up` takes until all is healthy, by part, and the CPU time of each process: make bench-start.

The first start compiles kernels where none are kept; name an empty folder in NUMBA_CACHE_DIR to see that. The later
ones are what users wait for each time. CPU time says more than wall time where other programs keep the machine busy.
"""

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.facts import say

MODEL = Path(__file__).parents[1] / "models" / "kvrail-demo"
LINE = re.compile(r"^(\S+) +\| .*? \[-\] (.*)")
PARTS = {
    "loading PyTorch": "interpreter and settings",
    "loading weights": "imports",
    "warming up": "weights and their check",
    "KV crosses": "warm-up",
    "listening": "transports and the first codec",
}
"""The beginning of the line that ends each part of a worker's start."""


def parts_of(lines: Iterator[str], begin: float) -> Iterator[tuple[str, str, float]]:
    """(process, part, seconds) of workers, as `kvrail up` prints their lines, until it says that all are healthy."""
    since: dict[str, float] = {}
    for line in lines:
        now = time.monotonic()
        if "Ctrl-C stops the cluster" in line:
            yield "all", "until healthy", now - begin
            return
        found = LINE.match(line)
        part = found and next((part for words, part in PARTS.items() if found[2].startswith(words)), None)
        if found and part and found[1] != "router":
            yield found[1], part, now - since.get(found[1], begin)
            since[found[1]] = now


def start(model: str) -> None:
    """Start a cluster, print the parts, and stop it."""
    command = [sys.executable, "-m", "kvrail", "up", "--model", model, "--device", "cpu", "--port", "0"]
    begin = time.monotonic()
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert up.stdout is not None
    for process, part, seconds in parts_of(iter(up.stdout.readline, ""), begin):
        print(f"  {process:<10} {part:<32} {seconds:6.1f} s")
    for child in psutil.Process(up.pid).children():
        role = next(part for part in child.cmdline() if part in ("router", "prefill", "decode"))
        used = child.cpu_times()
        print(f"  {role:<10} {'CPU, user + system':<32} {used.user:6.1f} + {used.system:.1f} s")
    up.send_signal(signal.SIGINT)
    up.communicate()


def main() -> None:
    """Start a cluster several times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(MODEL), help="folder or Hub name (default: the demo model)")
    parser.add_argument("--starts", type=int, default=2, help="how many (default 2)")
    arguments = parser.parse_args()
    say("benchmarks.start")
    for number in range(arguments.starts):
        print(f"start {number + 1}")
        start(arguments.model)


if __name__ == "__main__":
    main()
