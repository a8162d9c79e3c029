"""Prints what a process has of its own, and ends with status 7 when it is asked to.

With the argument `child` it prints what a process has that it starts, and ends.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1:] == ["child"]:
        with subprocess.Popen([sys.executable, "-m", "tests.own"], stdout=subprocess.PIPE, text=True) as child:
            sys.stdout.writelines(iter(child.stdout.readline, ".\n"))
            child.kill()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    drawn = (random.random(), np.random.random(), uuid.uuid4(), next(tempfile._get_candidate_names()))
    told = "".join(f"drawn {each}\n" for each in drawn)
    (ignored,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn"))
    sys.stdout.write(f"OWN={os.environ['OWN']}\n{ignored}\n{told}.\n")
    sys.stdout.flush()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
