"""A small HTTP server beside a worker's gRPC one: metrics and health for those who speak no gRPC."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvrail.errors import ConfigError
from kvrail.tls import Tls, roles_of

METRICS_PATHS = ("/metrics", "/metrics/vllm")
ROLES = "roles"
"""Key of a request's state: the roles of the client's certificate."""


class _KnowingProtocol(HttpToolsProtocol):
    """Tells the application whose certificate a client has shown."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        shown = self.transport.get_extra_info("peercert") or {}
        uris = (value for kind, value in shown.get("subjectAltName", ()) if kind == "URI")
        self.scope["state"] = {ROLES: roles_of(uris)}


class _Server(uvicorn.Server):
    """Leaves signals to the worker, whose drain decides when this server ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; set metrics-port to a free port, or to 0"
        ) from error
    return listener


async def start_side_server(
    host: str,
    port: int,
    render: Callable[[str], tuple[bytes, str]],
    healthy: Callable[[], bool],
    tls: Tls | None = None,
) -> tuple[int, Callable[[], Awaitable[None]]]:
    """Serve /metrics, /metrics/vllm and /health; returns the bound port and a coroutine function that stops it.

    render: path -> (body, content type), for the two metrics paths. healthy: False turns /health into a 503.
    tls: its certificate; then metrics are for who has one of the CA, of any role. /health asks for none: whoever
    probes may have none, and learns one bit. Raises ConfigError where the port is taken.
    """

    async def metrics(request: Request) -> Response:
        if tls is not None and not request.scope["state"][ROLES]:
            return Response("metrics are for certificates of this cluster's CA; show one\n", status_code=403)
        body, content_type = render(request.url.path)
        return Response(body, headers={"content-type": content_type})

    async def health(_: Request) -> Response:
        return Response("ok\n") if healthy() else Response("not serving\n", status_code=503)

    routes = [Route("/health", health), *(Route(path, metrics) for path in METRICS_PATHS)]
    listener = _listen(host, port)
    protocol = "auto" if tls is None else _KnowingProtocol
    config = uvicorn.Config(Starlette(routes=routes), http=protocol, log_config=None, access_log=False, lifespan="off")
    config.load()
    if tls is not None:
        config.ssl = tls.listening_context()
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http side server")

    async def stop() -> None:
        server.should_exit = True
        await task

    return listener.getsockname()[1], stop
