"""Calls of a prefill worker that lives in this event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from kvrail.errors import DeadlineError
from kvrail.rpc.prefill.call import PrefillCall
from kvrail.rpc.prefill.replies import Deliver, PrefillReplies
from kvrail.runtime.waiting import settled
from kvrail.wire.v1.prefill_pb2 import PrefillReply, PrefillRequest

Handler = Callable[[PrefillRequest, PrefillReplies], Coroutine[Any, Any, None]]
"""What a prefill worker does for one call: answers through its second argument and commits, or raises."""


async def serve(handler: Handler, request: PrefillRequest, deliver: Deliver) -> None:
    """Run a handler and deliver its replies."""
    replies = PrefillReplies()
    await replies.serve(handler(request, replies), deliver)


class InprocPrefillClient:
    """Calls a handler; `host` as a PrefillClient's."""

    host = ""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def prefill(self, request: PrefillRequest, *, timeout_s: float | None = None) -> PrefillCall:
        """Begin a call; it opens at the event loop's next turn. Past `timeout_s` it ends with DeadlineError."""
        return PrefillCall(self._replies(request, timeout_s))

    async def _replies(self, request: PrefillRequest, timeout_s: float | None) -> AsyncGenerator[PrefillReply, None]:
        delivered: asyncio.Queue[PrefillReply] = asyncio.Queue()
        serving = asyncio.create_task(serve(self._handler, request, delivered.put), name="prefill serving")
        try:
            async with asyncio.timeout(timeout_s):
                while not (serving.done() and delivered.empty()):
                    taking = asyncio.create_task(delivered.get())
                    await asyncio.wait((serving, taking), return_when=asyncio.FIRST_COMPLETED)
                    if taking.done():
                        yield taking.result()
                    taking.cancel()
            serving.result()
        except TimeoutError as error:
            raise DeadlineError(f"the prefill call's {timeout_s} s are over") from error
        finally:
            serving.cancel()
            await settled(serving)
