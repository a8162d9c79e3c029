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

    async def get_status(
        self, asked: common_pb2.StatusRequest = NO_PAGES, *, timeout_s: float
    ) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load, and for the KV events after those that `asked` names."""
        return await _status(self._stub, self._peer, asked, timeout_s)


class PrefillStatusClient:
    """Asks a prefill worker how it is; the prefill call itself is kvrail.rpc.prefill.client's."""

    def __init__(self, channel: grpc.aio.Channel, peer: str = "the prefill worker") -> None:
        self._stub: Any = prefill_pb2_grpc.PrefillStub(channel)  # type: ignore[no-untyped-call]
        self._peer = peer

    async def get_status(
        self, asked: common_pb2.StatusRequest = NO_PAGES, *, timeout_s: float
    ) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load, and for the KV events after those that `asked` names."""
        return await _status(self._stub, self._peer, asked, timeout_s)
