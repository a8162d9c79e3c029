"""Typed clients: the error tree instead of gRPC's errors, and streams that end by themselves."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar, cast

import grpc
import grpc.aio

from kvrail.errors import IncompatibleError, RequestCancelledError
from kvrail.rpc.errors import from_rpc_error, is_cancelling
from kvrail.wire.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2_grpc

Reply = TypeVar("Reply")


class ReplyStream(Generic[Reply]):
    """The replies of one response-streaming call; `async for` or `read` takes them in order.

    Leaving the stream unfinished requires `cancel()`; used as an async context manager it does so by itself.
    """

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer

    async def read(self) -> Reply | None:
        """Take the next reply, or None at the end; raises the error that the peer raised.

        After `cancel()` from another task: RequestCancelledError.
        """
        try:
            reply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self._peer) from error
        except asyncio.CancelledError:
            if is_cancelling():
                raise
            raise RequestCancelledError(f"the call to {self._peer} was cancelled here") from None
        if reply is grpc.aio.EOF:
            return None
        if reply is None:  # what gRPC makes of bytes that it cannot read
            self.cancel()
            raise IncompatibleError(f"{self._peer} sent a reply that is no message of this protocol version")
        return cast(Reply, reply)

    async def __aiter__(self) -> AsyncIterator[Reply]:
        while (reply := await self.read()) is not None:
            yield reply

    def cancel(self) -> None:
        """End the call now; harmless where it has ended."""
        self._call.cancel()

    async def __aenter__(self) -> "ReplyStream[Reply]":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()


async def _status(stub: Any, peer: str, timeout_s: float) -> common_pb2.WorkerStatus:
    try:
        status: common_pb2.WorkerStatus | None = await stub.GetStatus(common_pb2.StatusRequest(), timeout=timeout_s)
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

    def generate(
        self, request: decode_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> ReplyStream[decode_pb2.GenerateReply]:
        """Open one generation; `timeout_s` travels with it as its deadline."""
        return ReplyStream(self._stub.Generate(request, timeout=timeout_s), self._peer)

    async def get_status(self, *, timeout_s: float) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load."""
        return await _status(self._stub, self._peer, timeout_s)


class PrefillStatusClient:
    """Asks a prefill worker how it is; the prefill call itself is kvrail.rpc.prefill's."""

    def __init__(self, channel: grpc.aio.Channel, peer: str = "the prefill worker") -> None:
        self._stub: Any = prefill_pb2_grpc.PrefillStub(channel)  # type: ignore[no-untyped-call]
        self._peer = peer

    async def get_status(self, *, timeout_s: float) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load."""
        return await _status(self._stub, self._peer, timeout_s)
