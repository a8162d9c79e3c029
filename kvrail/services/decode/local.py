"""Prompts that a decode worker computes by itself: where that costs less than fetching, or where fetching failed."""

from kvrail.engine.schedule.cost import Line, LineFit
from kvrail.errors import OverloadedError

UNMEASURED_TOKENS = 64
"""Default until both rates are measured; costs about one fetch handshake."""

RETRY_AFTER_S = 2.0
LOCAL_FALLBACK_TOKENS = 16384
"""Prompt tokens that wait here at most: eight steps of 2,048, after which running sequences would wait for seconds."""


def local_tokens(local: Line, remote: Line, running: int, most: int) -> int:
    """Missing tokens of a prompt up to which the decode worker computes them by itself.

    local: seconds of its steps by tokens of prompts. remote: seconds from a request's admission to its first token, by
    the tokens that a prefill worker computed; what waits there is in it. running: sequences that decode here, each of
    which waits while the prompt is computed: seconds count once for each. most: tokens that one step has for prompts
    beside them, so that no stream ever waits longer than that.
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

    remote: seconds to a first output token, by tokens that a prefill worker computed.
    """

    def __init__(self, fixed: int, most: int) -> None:
        self._fixed, self._most = fixed, most
        self.remote = LineFit()

    def tokens(self, running: int, local: Line) -> int:
        """Missing tokens up to which a prompt that comes now is computed here, beside `running` sequences.

        local: seconds of this worker's steps with prompts, as measured by now.
        """
        if self._fixed >= 0:
            return self._fixed
        return local_tokens(local, self.remote.line(), running, self._most)


class LocalFallbacks:
    """Counts tokens of such prompts from when they are taken until they are computed. Belongs to one event loop.

    max_tokens: that may wait here at once; a prompt that comes when none waits is always taken.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens: dict[str, int] = {}  # by request

    def take(self, request_id: str, tokens: int) -> None:
        """A prompt is to be computed here. Raises OverloadedError where too many wait for that."""
        waiting = sum(self._tokens.values())
        if waiting and waiting + tokens > self._max_tokens:
            raise OverloadedError(
                f"no prefill worker could take the prompt, and prompts of {waiting} tokens wait already to be computed"
                f" by the decode worker, which takes {self._max_tokens}; retry later",
                retry_after=RETRY_AFTER_S,
            )
        self._tokens[request_id] = tokens

    def over(self, request_id: str) -> None:
        """It is computed, or its request is gone."""
        self._tokens.pop(request_id, None)
