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
    import triton.language as tl
    from triton.runtime.interpreter import (
        InterpretedFunction,
        InterpreterBuilder,
        InterpreterOptions,
        TensorHandle,
        interpreter_builder,
    )

    call_anew, multiply = InterpretedFunction.__call__, InterpreterBuilder.create_dot

    def call_from_kernel(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        """The interpreter puts its functions into triton.language anew at each such call: minutes in all."""
        languages = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return call_anew(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    def multiply_values(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *more: object) -> TensorHandle:
        """The interpreter multiplies bfloat16 by their bits, as integers."""
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *more)

    def bfloat16_constant(self: InterpreterBuilder, value: float) -> TensorHandle:
        """The compiler rounds constants of bfloat16 to six decimals, so that small ones are 0."""
        return self.create_fp_trunc(self.get_fp32(float(f"{value:f}")), tl.bfloat16)

    InterpretedFunction.__call__, InterpreterBuilder.create_dot = call_from_kernel, multiply_values
    InterpreterBuilder.get_bf16 = bfloat16_constant
    # Of each sum and product of integers it would find out whether it overflows, and tell nobody: half of the time.
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)

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
    "engine/test_attention_kernels.py",
    "codec/test_ans_kernels.py",
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
