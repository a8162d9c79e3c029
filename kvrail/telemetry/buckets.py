"""Bounds of the histograms' buckets.

Where a histogram is shown under vLLM's names too, vLLM's own bounds are among them: its dashboards name some.
"""

from collections.abc import Iterable


def _union(*groups: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted({float(bound) for group in groups for bound in group}))


_VLLM_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_VLLM_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
_VLLM_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_VLLM_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
_VLLM_SEQUENCES = (1, 2, 5, 10, 20)
_VLLM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_VLLM_HTTP = (0.1, 0.5, 1)

TIME_TO_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
"""From a cached prompt on a fast GPU to a long prompt on a busy one, in seconds."""
STEP = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(1.0, 2.5, 5.0),
)
"""One decode step, in seconds; fine around the 10 to 50 ms that readers notice."""
PART = (
    *(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 60.0, 300.0),
)
"""Parts of a request, which may be far shorter than a token, in seconds."""
POWERS = tuple(float(1 << power) for power in range(0, 18))
"""Counts: powers of two up to 131072."""

REQUEST = _union(
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0), _VLLM_REQUEST
)
"""From a short local answer past the default deadline, in seconds."""
PHASE = _union(PART, _VLLM_REQUEST)
"""Phases of a request that vLLM knows, in seconds."""
FIRST_TOKEN = _union(TIME_TO_TOKEN, _VLLM_FIRST_TOKEN)
"""Until the first token, in seconds."""
TOKEN = _union(STEP, _VLLM_TOKEN)
"""Between two tokens, in seconds."""
TOKENS = _union(POWERS, _VLLM_TOKENS)
"""Token counts; vLLM's end at the model's context, these at a million."""
SEQUENCES = _union((1, 2, 4, 8, 16, 32, 64, 128), _VLLM_SEQUENCES)
"""The parameter n."""
HTTP = _union((0.005, 0.025, 2.5, 10, 60, 600), _VLLM_HTTP)
"""An HTTP request from its head to its last byte, in seconds."""
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""A share, 0 to 1."""
DRAFTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Accepted drafts, up to the default maximum of a sequence."""
PREEMPTIONS = _union((0,), _VLLM_PREEMPTIONS)
"""Preemptions of one request."""
