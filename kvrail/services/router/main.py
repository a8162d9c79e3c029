"""The process `kvrail router`: serves until SIGTERM or SIGINT, then lets running requests finish."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI

from kvrail.config.settings import RouterSettings
from kvrail.errors import ConfigError
from kvrail.rpc.http_side import SideServer, listen, side_config
from kvrail.runtime import logs, loops
from kvrail.runtime.limits import allow_files
from kvrail.security.tls import DoorCertificate, Tls
from kvrail.services.router.answer.service import RouterService
from kvrail.services.router.http.app import build_admin, build_app
from kvrail.services.router.http.connection import ClientConnection, ConnectionLimits
from kvrail.services.router.http.middleware import NO_HANDLER, NO_METHOD
from kvrail.services.router.plan.defaults import defaults_of
from kvrail.text import load_tokenizer

log = logging.getLogger("kvrail.router")

HEAD_TIMEOUT_S = 10.0
"""Seconds in which a request's headers come at most: a client sends them in one packet or two."""
IDLE_S = 75
"""Seconds that a connection stays open without a request: longer than clients and proxies use theirs again (60 s)."""
CLOSE_TIMEOUT_S = 5
"""Seconds that connections get to take their last bytes once everything has ended."""
CONNECTIONS_PER_REQUEST = 4
"""Connections that clients may keep open, for each request that may run: pools of clients hold idle ones."""
OTHER_FILES = 256
"""Files that the router has open beside its clients' connections: the workers' and its own."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RouterServer(uvicorn.Server):
    """A server that, once asked to stop, still listens and answers 503 while running requests finish.

    The first signal starts the drain; a second one, or the end of the grace period, ends what still runs.
    """

    def __init__(self, app: FastAPI, settings: RouterSettings) -> None:
        wait_s = settings.client_timeout_s
        limits = ConnectionLimits(min(wait_s, HEAD_TIMEOUT_S), wait_s, wait_s, most_connections(settings))
        config = uvicorn.Config(
            app,
            http=partial(ClientConnection, limits=limits, refused=self._note_refused),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=list(settings.trusted_proxies),
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        config.load()
        door: DoorCertificate | None = app.state.door
        if door is not None:
            config.ssl = door.listening_context()
        super().__init__(config)
        self._app = app
        self._head_s = limits.head_s
        self._grace_period_s = settings.grace_period_s
        self._drain_ends: float | None = None
        self._admin: tuple[SideServer, socket.socket] | None = None
        self._admin_runs: asyncio.Task[None] | None = None

    def open_admin(self, settings: RouterSettings) -> None:
        """Serve operators at a port of their own, if the settings name one.

        Raises ConfigError if its address is not available.
        """
        tls: Tls | None = self._app.state.tls
        if settings.metrics_tls and (settings.admin_port < 0 or tls is None):
            raise ConfigError(
                "--metrics-tls is for --admin-port, with --tls-ca, --tls-cert and --tls-key; give those too"
            )
        if settings.admin_port < 0:
            return
        host, tls = settings.admin_host or settings.host, tls if settings.metrics_tls else None
        listener = listen(host, settings.admin_port, "admin-port")
        app = build_admin(self._app, self.drain, tls, page=settings.status_page != "off")
        self._admin = SideServer(side_config(app, tls)), listener
        log.info("admin port on %s:%d", host, listener.getsockname()[1])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve; a TLS handshake has the time of headers, for which uvicorn has no setting."""
        await super().startup(sockets=[])
        create, ssl, queue = asyncio.get_running_loop().create_server, self.config.ssl, self.config.backlog
        parts = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        door, limit_s = partial(self.config.http_protocol_class, **parts), self._head_s if ssl else None
        for each in sockets or ():
            self.servers.append(await create(door, sock=each, ssl=ssl, backlog=queue, ssl_handshake_timeout=limit_s))
        if self._admin is not None:
            server, listener = self._admin
            self._admin_runs = asyncio.create_task(server.serve(sockets=[listener]), name="admin port")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; the admin port answers until everything has ended."""
        await super().shutdown(sockets=sockets)
        if self._admin is not None and self._admin_runs is not None:
            self._admin[0].should_exit = True
            await self._admin_runs

    def drain(self) -> None:
        """Begin the drain, unless it has begun."""
        if self._drain_ends is None:
            self.stop()

    def _note_refused(self, status: int) -> None:
        """Count a request that the connection refused before the application saw it."""
        service: RouterService = self._app.state.service
        service.metrics.answered(NO_HANDLER, NO_METHOD, status)

    def stop(self) -> None:
        """Begin the drain; called again, end it."""
        if not self.started:
            self.should_exit = True
            return
        service: RouterService = self._app.state.service
        if self._drain_ends is None:
            log.info("draining: %d requests get up to %g s", service.admission.active, self._grace_period_s)
            service.admission.draining = True
            self._drain_ends = time.monotonic() + self._grace_period_s
        else:
            self._drain_ends = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Decide, ten times a second, whether the server ends."""
        if self._drain_ends is not None:
            admission = self._app.state.service.admission
            if admission.active == 0:
                return True
            if time.monotonic() >= self._drain_ends:
                log.warning("ending %d requests that still run", admission.active)
                admission.cancel_all()
                return True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn signals into `stop`; unlike uvicorn's, do not raise them again, so that the process exits with 0."""
        loop = asyncio.get_running_loop()
        try:
            for number in SIGNALS:
                loop.add_signal_handler(number, self.stop)
        except (RuntimeError, ValueError):  # not the main thread: the embedding program calls stop
            yield
            return
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


def most_connections(settings: RouterSettings) -> int:
    """Connections of clients at once; more are answered 503."""
    return CONNECTIONS_PER_REQUEST * settings.max_concurrent_requests


def run(settings: RouterSettings) -> int:
    """Serve until asked to stop; returns the exit status. Raises ConfigError where a setting does not work."""
    logs.setup(settings.log_level, settings.log_format, "router")
    loops.share_interpreter()
    tokenizer = load_tokenizer(settings.model)
    app = build_app(settings, tokenizer, defaults_of(settings))
    server = RouterServer(app, settings)
    allow_files(most_connections(settings) + OTHER_FILES)
    listener = listen(settings.host, settings.port)
    scheme = "https" if settings.tls_http_cert else "http"
    log.info("listening on %s://%s:%d", scheme, settings.host, listener.getsockname()[1])
    server.open_admin(settings)
    loops.keep_what_is_here()
    server.run(sockets=[listener])
    log.info("stopped")
    return 0
