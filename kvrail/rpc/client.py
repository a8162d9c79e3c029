"""Typed clients: the error tree instead of gRPC's errors, and streams that end by themselves."""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from kvrail.errors import IncompatibleError
from kvrail.rpc.errors import from_rpc_error
from kvrail.rpc.trunk import ReplyStream, Trunk
from kvrail.wire.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2_grpc

NO_PAGES = common_pb2.StatusRequest()
"""Asks for no news of pages."""


async def _status(stub: Any, peer: str, asked: common_pb2.StatusRequest, timeout_s: float) -> common_pb2.WorkerStatus:
    try:
        status: common_pb2.WorkerStatus | None = await stub.GetStatus(asked, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer=peer) from error
    if status is None:  # what gRPC makes of bytes that it cannot read
        raise IncompatibleError(f"{peer} sent a status that is no message of this protocol version")
    return status


class DecodeClient:
    """Calls a decode worker; `peer` names it in errors."""

    def __init__(self, channel: grpc.aio.Channel, peer: str = "the decode worker") -> None:
        self._stub: Any = decode_pb2_grpc.DecodeStub(channel)  # type: ignore[no-untyped-call]
        self._peer = peer
        self._trunk = Trunk(self._stub.GenerateMany, peer)

    def generate(
        self,
        request: decode_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        on_overflow: Callable[[], object] | None = None,
    ) -> ReplyStream:
        """Begin one generation, over the stream that all share; `timeout_s` travels with it as its deadline.

        on_overflow: called where it is ended because its replies are not read. Raises InvalidRequestError for a request
        that is too large to send.
        """
        return self._trunk.call(request, timeout_s=timeout_s, on_overflow=on_overflow)

    def give_up(self, reason: str) -> None:
        """Have everybody who waits for the worker hear that it is lost."""
        self._trunk.give_up(reason)

    async def close(self) -> None:
        """End what still runs."""
        await self._trunk.close()

    async def get_status(
        self, asked: common_pb2.StatusRequest = NO_PAGES, *, timeout_s: float
    ) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load, and for the news of pages that `asked` names."""
        return await _status(self._stub, self._peer, asked, timeout_s)


class PrefillStatusClient:
    """Asks a prefill worker how it is; the prefill call itself is kvrail.rpc.prefill.client's."""

    def __init__(self, channel: grpc.aio.Channel, peer: str = "the prefill worker") -> None:
        self._stub: Any = prefill_pb2_grpc.PrefillStub(channel)  # type: ignore[no-untyped-call]
        self._peer = peer

    async def get_status(
        self, asked: common_pb2.StatusRequest = NO_PAGES, *, timeout_s: float
    ) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load, and for the news of pages that `asked` names."""
        return await _status(self._stub, self._peer, asked, timeout_s)
