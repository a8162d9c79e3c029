"""Which prompts a decode worker computes by itself: those for which that costs less than fetching, as measured."""

from collections.abc import Callable

from kvrail.engine.schedule.cost import Line, LineFit

UNMEASURED_TOKENS = 64
"""As long as nothing is known of the one or the other: about what the handshake of a fetch takes to compute."""


def local_tokens(local: Line, remote: Line, running: int, most: int) -> int:
    """Missing tokens of a prompt up to which the decode worker computes them by itself.

    local: seconds of its steps by tokens of prompts. remote: seconds from a request's admission to its first token, by
    the tokens that a prefill worker computed; what waits there is in it. running: sequences that decode here, each of
    which waits while the prompt is computed: seconds count once for each. most: tokens that one step has for prompts
    beside them, so that nobody ever waits longer than that.
    """
    if not (local.each and remote.each):
        return min(UNMEASURED_TOKENS, most)
    gain = remote.base - local.base * (1 + running)
    cost = local.each * (1 + running) - remote.each
    if cost <= 0:  # the more tokens, the better here
        return most if gain >= cost * most else 0
    return max(0, min(most, int(gain / cost)))


class LocalPrefill:
    """Keeps what `local_tokens` needs. fixed: the operator's number, or -1: measure.

    pace: seconds of this worker's steps with prompts, as measured by now.
    """

    def __init__(self, fixed: int, pace: Callable[[], Line], most: int) -> None:
        self._fixed = fixed
        self._pace = pace
        self._most = most
        self._remote = LineFit()

    def fetched(self, tokens: int, seconds: float) -> None:
        """A prefill worker computed so many tokens; the first one drawn came after so long."""
        self._remote.note(tokens, seconds)

    def tokens(self, running: int) -> int:
        """Missing tokens up to which a prompt that comes now is computed here, beside so many running sequences."""
        if self._fixed >= 0:
            return self._fixed
        return local_tokens(self._pace(), self._remote.line(), running, self._most)
