"""Servers: building, binding, health, and an end that lets running requests finish."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from kvrail.errors import ConfigError
from kvrail.rpc.events_server import DecodeService
from kvrail.rpc.options import KEEPALIVE_TIME_MS, MAX_MESSAGE_BYTES, common_options
from kvrail.rpc.roles import RoleCheck
from kvrail.security.tls import Material, Tls
from kvrail.wire.v1 import decode_pb2_grpc, prefill_pb2_grpc

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class RpcServer:
    """A gRPC server with the standard health service, NOT_SERVING until `start`."""

    server: grpc.aio.Server
    health: health_aio.HealthServicer
    tls: Tls | None = None
    decode: DecodeService | None = None

    def add_prefill(self, servicer: prefill_pb2_grpc.PrefillServicer) -> None:
        """Serve the Prefill service."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, self.server)  # type: ignore[no-untyped-call]

    def add_decode(self, servicer: DecodeService) -> None:
        """Serve the Decode service."""
        self.decode = servicer
        decode_pb2_grpc.add_DecodeServicer_to_server(servicer, self.server)  # type: ignore[no-untyped-call]

    def bind(self, host: str, port: int) -> int:
        """Listen on `host`:`port` (0: any free one) once started; returns the port. Raises ConfigError where taken."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = (
                self.server.add_insecure_port(address)
                if self.tls is None
                else self.server.add_secure_port(address, _credentials(self.tls))
            )
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: the port is taken or the address is not this machine's; "
                "set host and port to a free one"
            ) from error
        return bound

    async def start(self) -> None:
        """Begin to serve, and say so."""
        await self.server.start()
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then cancel them."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """Ask every client for a certificate of the CA; each handshake uses what the files hold by then."""

    def certificates(material: Material) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)

    used = tls.material()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if (material := tls.material()) is used:
            return None
        used = material
        return certificates(material)

    return grpc.dynamic_ssl_server_credentials(certificates(used), renewed, require_client_authentication=True)


async def build_server(*, tls: Tls | None = None) -> RpcServer:
    """Build a server that enforces message bounds and answers its clients' keepalive pings.

    tls: its certificate; then clients need one too, and its role says what they may call.
    """
    options = [
        *common_options(MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),  # a second process on the same port is a mistake, not a load balancer
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    server = grpc.aio.server(options=options, interceptors=[] if tls is None else [RoleCheck()])
    health = health_aio.HealthServicer()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return RpcServer(server, health, tls)


async def serve_until_signal(
    rpc: RpcServer,
    *,
    on_drain: Callable[[], None],
    on_ready: Callable[[], None] = lambda: None,
    drained: Callable[[], Awaitable[None]],
    grace_period_s: float,
    broken: Coroutine[Any, Any, Exception] | None = None,
) -> None:
    """Serve a started server until SIGTERM or SIGINT, then drain it; the process can exit with 0 after this.

    On the first signal: health turns NOT_SERVING, `on_drain` stops admission, and running requests get
    `grace_period_s` seconds until `drained` returns and their output is sent. A second signal ends the wait. What still
    runs is cancelled.
    on_ready: called once signals are taken. broken: the error that it returns is raised at once, without waiting for
    requests.
    """
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    async def sent() -> None:
        await drained()
        if rpc.decode is not None:
            await rpc.decode.flushed()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    on_ready()
    watch = None if broken is None else asyncio.create_task(broken)
    asked = asyncio.create_task(first.wait())
    tasks: list[asyncio.Task[Any]] = [asked] if watch is None else [asked, watch]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if watch is not None and watch.done():
            raise watch.result()
        log.info("draining: no new requests, up to %g s for running ones", grace_period_s)
        await rpc.health.enter_graceful_shutdown()
        on_drain()
        await _wait_drained(sent, second, grace_period_s)
    finally:
        for task in tasks:
            task.cancel()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        await rpc.stop()
    log.info("stopped")


async def _wait_drained(drained: Callable[[], Awaitable[None]], hurry: asyncio.Event, grace_period_s: float) -> None:
    """Wait until `drained` returns, `hurry` is set or the grace period is over; raises what `drained` raises."""
    done = asyncio.ensure_future(drained())
    hurried = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait((done, hurried), timeout=grace_period_s, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            done.result()
        else:
            log.warning(
                "cancelling the requests that still run: %s", "second signal" if hurry.is_set() else "grace over"
            )
    finally:
        for task in (done, hurried):
            task.cancel()
        await asyncio.gather(done, hurried, return_exceptions=True)
