"""Frames inside the response stream of `Prefill.Prefill`."""

import functools

import grpc
import grpc.aio

from kvrail.errors import RequestCancelledError, WorkerUnavailableError
from kvrail.rpc.errors import from_rpc_error
from kvrail.transport.call import PrefillCall
from kvrail.transport.frames import DEFAULT_QUEUED_BYTES, Deliver
from kvrail.transport.replies import Story, tell
from kvrail.wire.replies import PREFILL_SERVICE, decode_reply
from kvrail.wire.v1.prefill_pb2 import PrefillRequest


async def serve_prefill(
    context: grpc.aio.ServicerContext, story: Story, *, max_queued_bytes: int = DEFAULT_QUEUED_BYTES
) -> None:
    """Answer one `Prefill.Prefill` call with a story; for a servicer's method under `maps_errors`."""
    await tell(story, context.write, max_queued_bytes=max_queued_bytes)


class PrefillClient:
    """Calls a prefill worker over gRPC; `peer` names it in errors."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        peer: str = "the prefill worker",
        *,
        max_queued_bytes: int = DEFAULT_QUEUED_BYTES,
    ) -> None:
        # Without a deserializer a reply comes as bytes: decode_reply spares a frame's copies, and its errors surface.
        self._prefill = channel.unary_stream(
            f"/{PREFILL_SERVICE}/Prefill", request_serializer=PrefillRequest.SerializeToString
        )
        self._peer = peer
        self._max_queued_bytes = max_queued_bytes

    def prefill(self, request: PrefillRequest, *, timeout_s: float | None = None) -> PrefillCall:
        """Begin a call; it opens at the event loop's next turn. Past `timeout_s` it ends with DeadlineError."""
        feed = functools.partial(self._feed, request, timeout_s)
        return PrefillCall(feed, max_queued_bytes=self._max_queued_bytes)

    async def _feed(self, request: PrefillRequest, timeout_s: float | None, deliver: Deliver) -> None:
        call = self._prefill(request, timeout=timeout_s)
        try:
            async for message in call:
                await deliver(decode_reply(message))
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, peer=self._peer)
            if isinstance(failure, RequestCancelledError):  # not by this end, which would have raised CancelledError
                failure = WorkerUnavailableError(f"{self._peer} cancelled the call: {failure}")
            raise failure from error
        finally:
            call.cancel()
