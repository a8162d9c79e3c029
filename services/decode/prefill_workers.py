"""Channels to prefill workers."""

import grpc.aio

from kvrail.rpc.channel import open_channel
from kvrail.transport.grpc import PrefillClient


class GrpcPrefillWorkers:
    """Opens a channel to a prefill worker when it is first asked for, and keeps it."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}

    def client(self, address: str) -> PrefillClient:
        """A client of the worker at `address`, host:port."""
        if address not in self._channels:
            self._channels[address] = open_channel(address, max_message_bytes=self._max_message_bytes)
        return PrefillClient(self._channels[address], peer=f"prefill worker {address}")

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()
