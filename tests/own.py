"""Prints what a process has of its own, and ends with status 7 when it is asked to."""

import os
import random
import signal
import sys
import tempfile
import uuid

import numpy as np


def main() -> None:
    """See the module's docstring."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    drawn = random.random(), float(np.random.random()), uuid.uuid4(), next(tempfile._get_candidate_names())  # type: ignore[attr-defined]
    sys.stdout.write(f"OWN={os.environ['OWN']}\ndrawn {drawn}\n.\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
