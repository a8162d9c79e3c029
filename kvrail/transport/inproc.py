"""Both ends in one process and one event loop: for single-process serving and for tests of what uses a transport."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvrail.errors import DeadlineError
from kvrail.transport.call import PrefillCall
from kvrail.transport.frames import DEFAULT_QUEUED_BYTES, Deliver
from kvrail.transport.replies import PrefillReplies, tell
from kvrail.wire.v1.prefill_pb2 import PrefillRequest

Handler = Callable[[PrefillRequest, PrefillReplies], Coroutine[Any, Any, None]]
"""What a prefill worker does with one request."""


class InprocPrefillClient:
    """Calls a prefill worker that lives in this event loop."""

    def __init__(self, handler: Handler, *, max_queued_bytes: int = DEFAULT_QUEUED_BYTES) -> None:
        self._handler = handler
        self._max_queued_bytes = max_queued_bytes

    def prefill(self, request: PrefillRequest, *, timeout_s: float | None = None) -> PrefillCall:
        """Begin a call; it opens at the event loop's next turn. Past `timeout_s` it ends with DeadlineError."""

        async def feed(deliver: Deliver) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    story = lambda replies: self._handler(request, replies)  # noqa: E731
                    await tell(story, deliver, max_queued_bytes=self._max_queued_bytes)
            except TimeoutError as error:
                raise DeadlineError(f"the prefill call's {timeout_s} s are over") from error

        return PrefillCall(feed, max_queued_bytes=self._max_queued_bytes)
