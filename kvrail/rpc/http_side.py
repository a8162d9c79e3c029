"""A small HTTP server beside a worker's gRPC one: metrics and health for those who speak no gRPC."""

import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvrail.errors import ConfigError
from kvrail.runtime import loops
from kvrail.security.tls import Tls, roles_of

METRICS_PATHS = ("/metrics", "/metrics/vllm")
ROLES = "roles"
"""Key of a request's state: the roles of the client's certificate."""


class _KnowingProtocol(HttpToolsProtocol):
    """Passes the roles of a client's certificate to the application."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        shown = self.transport.get_extra_info("peercert") or {}
        uris = (value for kind, value in shown.get("subjectAltName", ()) if kind == "URI")
        self.scope["state"] = {ROLES: roles_of(uris)}


class MembersOnly:
    """Lets in who has shown a certificate of the CA, of any role; some paths are open to all."""

    def __init__(self, app: ASGIApp, open_paths: frozenset[str]) -> None:
        self._app, self._open = app, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and not scope["state"][ROLES] and scope["path"] not in self._open:
            refusal = Response("this is for certificates of this cluster's CA; show one\n", status_code=403)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def side_config(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    """How a port for operators is served. tls: its certificate; it asks clients for one, see MembersOnly."""
    protocol: type[HttpToolsProtocol] | Literal["auto"] = "auto" if tls is None else _KnowingProtocol
    config = uvicorn.Config(
        app,
        http=protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # by default uvicorn trusts every process on this host
        ws="none",
    )
    config.load()
    if tls is not None:
        config.ssl = tls.listening_context()
    return config


class SideServer(uvicorn.Server):
    """Leaves signals to the process's main server, whose drain decides when this one ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def listen(host: str, port: int, setting: str = "port") -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises ConfigError, which names `setting`, if it cannot."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; set {setting} to a free port, or to 0") from error
    return listener


@contextlib.contextmanager
def side_server(
    host: str,
    port: int,
    render: Callable[[str, str], Awaitable[tuple[bytes, str]]],
    obstacle: Callable[[], str],
    tls: Tls | None = None,
) -> Iterator[int]:
    """Serve /metrics, /metrics/vllm and /health while the block runs; yields the bound port.

    The server has a thread and a loop of its own, so that it answers while the process imports or loads something.
    render: path and Accept header -> (body, content type), for the two metrics paths. obstacle: why requests cannot be
    sent here, which turns /health into a 503, or "". Both are called in that thread. tls: its certificate; then metrics
    need a client certificate of the CA, of any role. /health needs none: a probe may have none, and learns the state
    alone. Raises ConfigError if the port is taken.
    """

    async def metrics(request: Request) -> Response:
        body, content_type = await render(request.url.path, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type, "vary": "accept"})

    async def health(_: Request) -> Response:
        why = obstacle()
        return Response(f"{why}\n", status_code=503) if why else Response("ok\n")

    routes = [Route("/health", health), *(Route(path, metrics) for path in METRICS_PATHS)]
    app: ASGIApp = Starlette(routes=routes)
    config = side_config(app if tls is None else MembersOnly(app, frozenset({"/health"})), tls)
    listener = listen(host, port, "metrics-port")
    server = SideServer(config)
    thread = threading.Thread(
        target=lambda: loops.run(server.serve(sockets=[listener])), name="http side server", daemon=True
    )
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
