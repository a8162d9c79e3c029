"""Before any test is imported: without a GPU, Triton's kernels run in its interpreter.

Triton reads the variable when a kernel is defined, its own library's at its import, which may be that of transformers.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import kernels
from tests.scratch import remove_all

TESTS = Path(__file__).parent

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.interpreter  # noqa: F401 - it mends the interpreter and makes it faster

# Where several processes run the tests, each needs all that numba compiles when it collects them.
if (name := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
    kernels.compile_all(int(name.removeprefix("gw")))

# A shell that starts the tests in the background ignores Ctrl-C; the processes that tests start must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test is timed: a busy machine is not a fault. In CI, hypothesis also draws the same examples every time.
settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("untimed")


LONG = (
    "cluster/test_load.py",
    "cli/test_up.py",
    "e2e/test_progressive_benchmark.py",
    "e2e/test_worker_end.py",
    "e2e/test_progressive_link.py",
    "package/test_wheel.py",
    "e2e/test_openai_client.py",
    "e2e/test_codecs.py",
    "e2e/test_lost_workers.py",
    "tracing/test_traces.py",
    "transport/conformance/test_transports_processes.py",
)
"""Files that take longest: begun last, one would have all other cores wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, all else in the order that it has."""
    ranks = {TESTS / name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish() -> None:
    """No collection of garbage looks at all that tests and libraries are: it takes a good part of a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Tiny models do not stay behind, and libraries see that all they made is freed."""
    gc.unfreeze()
    remove_all()
