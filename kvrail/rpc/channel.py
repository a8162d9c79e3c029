"""Client channels."""

import asyncio
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import grpc
import grpc.aio

from kvrail.rpc.options import CONNECT_TIMEOUT_MS, MAX_MESSAGE_BYTES, MAX_RECONNECT_BACKOFF_MS, common_options
from kvrail.security.tls import Material, Role, Tls, role_host


def open_channel(
    target: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES, tls: Tls | None = None, role: Role | None = None
) -> grpc.aio.Channel:
    """Open a channel to `target`, host:port; it connects on its first call and again after a loss.

    No call is retried: failing over is the caller's decision.
    tls: this process's certificate, by which the other end knows it; None: no encryption. role: the other end's.
    """
    options: list[tuple[str, int | str]] = [
        *common_options(max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS // 2),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # of an attempt, whatever the name says
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if tls.verify == "role" and role is not None:
        options.append(("grpc.ssl_target_name_override", role_host(role)))

    def connect(material: Material) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
        return grpc.aio.secure_channel(target, credentials, options=options)

    return RenewedChannel(tls, connect)


class _Issue:
    """A channel with one certificate; closed once it is replaced and its last call has ended."""

    def __init__(self, channel: grpc.aio.Channel, number: int) -> None:
        self.channel, self.number = channel, number
        self._calls = 0
        self._closing: asyncio.Task[None] | None = None
        self._retired = False

    def track(self, call: Any) -> Any:
        """Count a call until it ends."""
        self._calls += 1
        call.add_done_callback(self._ended)
        return call

    def retire(self) -> None:
        """No new calls come."""
        self._retired = True
        self._close_if_idle()

    def _ended(self, _: Any) -> None:
        self._calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._retired and not self._calls and self._closing is None:
            self._closing = asyncio.ensure_future(self.channel.close())


class RenewedChannel(grpc.aio.Channel):  # type: ignore[misc]
    """A channel whose new calls use the certificate that the files hold now. Running calls end as they began."""

    def __init__(self, tls: Tls, connect: Callable[[Material], grpc.aio.Channel]) -> None:
        self._tls, self._connect = tls, connect
        material = tls.material()
        self._issue = _Issue(connect(material), material.number)
        self._older: list[_Issue] = []

    def _current(self) -> _Issue:
        material = self._tls.material()
        if material.number != self._issue.number:
            old, self._issue = self._issue, _Issue(self._connect(material), material.number)
            self._older.append(old)
            old.retire()
        return self._issue

    def _method(self, kind: str, *arguments: Any, **named: Any) -> Callable[..., Any]:
        """Make a method's callable; see grpc.aio.Channel."""
        made: list[tuple[_Issue, Callable[..., Any]]] = []

        def call(*values: Any, **options: Any) -> Any:
            issue = self._current()
            if not made or made[0][0] is not issue:
                made[:] = [(issue, getattr(issue.channel, kind)(*arguments, **named))]
            return issue.track(made[0][1](*values, **options))

        return call

    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_unary = partialmethod(_method, "stream_unary")
    stream_stream = partialmethod(_method, "stream_stream")

    async def close(self, grace: float | None = None) -> None:
        """Close what this opened; running calls get `grace` seconds."""
        await asyncio.gather(*(issue.channel.close(grace) for issue in (*self._older, self._issue)))

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._current().channel.channel_ready()
