"""A decode worker that breaks: `python -m tests.e2e.broken_worker raises|hangs|blocks --port N ...`.

raises, hangs: its engine. blocks: its event loop.
"""

import sys
import time

from kvrail.engine.runner import ModelRunner
from services.cli.main import main
from services.decode.progress import Progress


def raises(*args: object) -> None:
    raise RuntimeError("the device is gone")


def hangs(*args: object) -> None:
    time.sleep(3600)


if __name__ == "__main__":
    if sys.argv[1] == "blocks":
        Progress.take = hangs
    else:
        ModelRunner.execute = {"raises": raises, "hangs": hangs}[sys.argv[1]]
    sys.exit(main(["decode", *sys.argv[2:]]))
