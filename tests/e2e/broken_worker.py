"""A decode worker whose engine breaks: `python -m tests.e2e.broken_worker raises|hangs --port N ...`."""

import sys
import time

from kvrail.engine.runner import ModelRunner
from services.cli.main import main


def raises(*args: object) -> None:
    raise RuntimeError("the device is gone")


def hangs(*args: object) -> None:
    time.sleep(3600)


if __name__ == "__main__":
    ModelRunner.execute = {"raises": raises, "hangs": hangs}[sys.argv[1]]
    sys.exit(main(["decode", *sys.argv[2:]]))
