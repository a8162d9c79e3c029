"""Channels to prefill workers."""

import grpc.aio

from kvrail.rpc.channel import open_channel
from kvrail.rpc.prefill import GrpcPrefillClient


class GrpcPrefillWorkers:
    """Opens a channel to a prefill worker when it is first asked for, and keeps it."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def client(self, address: str) -> GrpcPrefillClient:
        """A client of the worker at `address`, host:port."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return GrpcPrefillClient(self._channels[address], address)

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()
