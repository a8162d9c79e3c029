"""Before any test is imported: without a GPU, Triton's kernels run in its interpreter.

Triton reads the variable when a kernel is defined, its own library's at its import, which may be that of transformers.
"""

import os
import signal

import torch
from hypothesis import HealthCheck, settings

from tests.scratch import remove_all

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    call_anew = InterpretedFunction.__call__

    def call_from_kernel(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        """The interpreter puts its functions into triton.language anew at each such call: minutes in all."""
        languages = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return call_anew(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call_from_kernel

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


def pytest_sessionfinish() -> None:
    """Tiny models do not stay behind."""
    remove_all()
