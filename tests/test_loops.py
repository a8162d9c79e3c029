"""What keeps an event loop from standing still."""

import subprocess
import sys

SCRIPT = """
import gc, sys, weakref
from kvrail.runtime import loops
class Cycle:
    def __init__(self):
        self.own = self
gc.disable()
early = weakref.ref(Cycle())
loops.keep_what_is_here()
kept = Cycle()
late = weakref.ref(kept)
assert early() is None and gc.get_freeze_count() > 10_000
loaded = len(gc.get_objects())
loops.keep_what_is_here()
del kept
gc.collect()
assert late() is not None, "what was here is not looked at"
print(loaded)
"""


def test_collections_spare_what_was_there_before_serving() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) < 1000  # all else is out of a full collection's way
