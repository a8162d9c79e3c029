import asyncio
import importlib.util
from contextlib import asynccontextmanager

import pytest

from kvrail.rpc.channel import open_channel
from kvrail.rpc.errors import maps_errors
from kvrail.rpc.prefill.client import GrpcPrefillClient
from kvrail.rpc.server import build_server
from kvrail.wire.v1 import prefill_pb2_grpc
from tests.inproc.prefill import InprocPrefillClient, serve


class Servicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, handler):
        self._handler = handler

    @maps_errors
    async def Prefill(self, request, context):
        await serve(self._handler, request, context.write)


class Inproc:
    """A worker whose death is the end of the tasks that handle its calls."""

    @asynccontextmanager
    async def connect(self, handler):
        self._calls = set()

        async def remembered(request, replies):
            self._calls.add(asyncio.current_task())
            await handler(request, replies)

        yield InprocPrefillClient(remembered)

    async def kill(self):
        for call in self._calls:
            call.cancel()


class Grpc:
    """A worker behind a socket; its death is its server's."""

    @asynccontextmanager
    async def connect(self, handler):
        self._rpc = await build_server()
        self._rpc.add_prefill(Servicer(handler))
        port = self._rpc.bind("127.0.0.1", 0)
        await self._rpc.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield GrpcPrefillClient(channel, f"127.0.0.1:{port}")
        await self._rpc.stop()

    async def kill(self):
        await self._rpc.stop()


@pytest.fixture(params=[Inproc, Grpc])
def transport(request):
    return request.param()


def pytest_asyncio_loop_factories(config, item):
    """gRPC brings a poller of its own, so it is tried on both loops where both are installed."""
    factories = {"asyncio": asyncio.new_event_loop}
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories
