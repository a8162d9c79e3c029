"""Typed clients: the error tree instead of gRPC's errors, and streams that end by themselves."""

from typing import Any

import grpc
import grpc.aio

from kvrail.errors import IncompatibleError, WorkerUnavailableError
from kvrail.rpc.errors import from_rpc_error
from kvrail.rpc.events import EventStream
from kvrail.wire.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc

NO_PAGES = common_pb2.StatusRequest()
"""Asks for no KV events."""


class StatusClient:
    """The call that workers of both roles answer; `peer` names the worker in errors."""

    def __init__(self, stub: Any, peer: str) -> None:
        self._stub = stub
        self._peer = peer

    async def get_status(
        self, asked: common_pb2.StatusRequest = NO_PAGES, *, timeout_s: float
    ) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load, and for the KV events after those that `asked` names."""
        try:
            status: common_pb2.WorkerStatus | None = await self._stub.GetStatus(asked, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self._peer) from error
        if status is None:  # what gRPC makes of bytes that it cannot read
            raise IncompatibleError(f"{self._peer} sent a status that is no message of this protocol version")
        return status


class DecodeClient(StatusClient):
    """Calls a decode worker."""

    def __init__(self, channel: grpc.aio.Channel, peer: str = "the decode worker") -> None:
        super().__init__(decode_pb2_grpc.DecodeStub(channel), peer)  # type: ignore[no-untyped-call]
        self._events: EventStream | None = None

    @property
    def events(self) -> EventStream:
        """The stream of this worker's requests; a new one where there is none, or the last one has broken."""
        if self._events is None or self._events.broken:
            self._events = EventStream(self._stub, self._peer)
        return self._events

    def give_up(self, reason: str) -> None:
        """The worker is lost: fail every request that runs there. The next one tries again."""
        if self._events is not None:
            self._events.break_off(WorkerUnavailableError(reason))

    async def close(self) -> None:
        """End what still runs."""
        if self._events is not None:
            await self._events.close()


class PrefillStatusClient(StatusClient):
    """Asks a prefill worker how it is; the prefill call itself is kvrail.rpc.prefill.client's."""

    def __init__(self, channel: grpc.aio.Channel, peer: str = "the prefill worker") -> None:
        super().__init__(prefill_pb2_grpc.PrefillStub(channel), peer)  # type: ignore[no-untyped-call]
