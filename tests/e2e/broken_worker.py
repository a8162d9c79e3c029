"""A decode worker that breaks: `python -m tests.e2e.broken_worker raises|hangs|forgets|blocks --port N ...`.

raises, hangs: its engine's steps. forgets: its engine, what is to be computed. blocks: its event loop.
"""

import sys
import threading
import time
from collections.abc import Callable

from kvrail.cli.main import main
from kvrail.engine import watch
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.runner import ModelRunner
from kvrail.services.decode.progress import Progress


def raises(*args: object) -> None:
    raise RuntimeError("the device is gone")


def hangs(*args: object) -> None:
    time.sleep(3600)


def in_steps(breaks: Callable[..., None]) -> Callable[..., object]:
    """A runner's `execute` that breaks once the engine steps; what a worker tries at its start is sound."""
    sound = ModelRunner.execute

    def execute(*args: object) -> object:
        if threading.current_thread().name == "engine":
            breaks()
        return sound(*args)

    return execute


if __name__ == "__main__":
    if sys.argv[1] == "blocks":
        Progress.take = hangs
    elif sys.argv[1] == "forgets":
        watch.STALLED_S = 2.0
        Scheduler.has_work = lambda scheduler: False
    else:
        ModelRunner.execute = in_steps({"raises": raises, "hangs": hangs}[sys.argv[1]])
    sys.exit(main(["decode", *sys.argv[2:]]))
