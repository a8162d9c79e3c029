"""Lines on standard error while a command works in silence."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_S = 2.0
"""Seconds between two lines."""


@contextmanager
def lines_while(text: Callable[[], str]) -> Iterator[None]:
    """While the block runs, write `text()` and how long it has run every LINE_S seconds."""
    done, begun = threading.Event(), time.monotonic()

    def write() -> None:
        while not done.wait(LINE_S):
            sys.stderr.write(f"{text()}, {time.monotonic() - begun:.0f} s so far\n")

    thread = threading.Thread(target=write, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
