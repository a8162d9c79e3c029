"""Calls of a prefill worker over gRPC."""

from collections.abc import AsyncGenerator

import grpc
import grpc.aio

from kvrail.errors import IncompatibleError, RequestCancelledError, WorkerUnavailableError
from kvrail.rpc.errors import from_rpc_error
from kvrail.rpc.prefill.call import PrefillCall
from kvrail.wire.v1 import prefill_pb2_grpc
from kvrail.wire.v1.prefill_pb2 import PrefillReply, PrefillRequest


class GrpcPrefillClient:
    """Calls a prefill worker over gRPC; `address`, host:port, names it in errors. host: by which it is reached."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._channel = channel
        self._prefill = prefill_pb2_grpc.PrefillStub(channel).Prefill  # type: ignore[no-untyped-call]
        self._peer = f"prefill worker {address}"
        self.host = address.rpartition(":")[0].strip("[]")

    def prefill(self, request: PrefillRequest, *, timeout_s: float | None = None) -> PrefillCall:
        """Begin a call; it opens at the event loop's next turn. Past `timeout_s` it ends with DeadlineError."""
        return PrefillCall(self._replies(request, timeout_s))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _replies(self, request: PrefillRequest, timeout_s: float | None) -> AsyncGenerator[PrefillReply, None]:
        call = self._prefill(request, timeout=timeout_s)
        try:
            async for reply in call:
                if reply is None:  # what gRPC makes of bytes that it cannot read
                    raise IncompatibleError(f"{self._peer} sent a reply that is no message of this protocol version")
                yield reply
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, peer=self._peer)
            if isinstance(failure, RequestCancelledError):  # not by this end, which would have raised CancelledError
                failure = WorkerUnavailableError(f"{self._peer} cancelled the call: {failure}")
            raise failure from error
        finally:
            call.cancel()
