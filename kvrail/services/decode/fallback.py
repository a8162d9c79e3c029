"""Prompts that no prefill worker took and that are computed here: a bounded number, for they slow all streams down."""

from kvrail.errors import OverloadedError

RETRY_AFTER_S = 2.0
LOCAL_FALLBACK_TOKENS = 16384
"""Prompt tokens that wait here at most: eight steps of 2,048, after which running sequences would wait for seconds."""


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
        """It is computed, or nobody waits for it any more."""
        self._tokens.pop(request_id, None)
