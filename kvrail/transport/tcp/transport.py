"""The transport: a listener where this worker sends, and connections to listeners where it receives."""

import asyncio
import functools
import hmac
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from kvrail.errors import ConfigError, TransferAbortedError, WorkerUnavailableError, reason_of
from kvrail.transport.base import Peer
from kvrail.transport.regions import RegionPool
from kvrail.transport.tcp.connection import Connection
from kvrail.transport.tcp.ends import TcpReceiver, TcpSender
from kvrail.transport.tcp.messages import (
    HELLO_BYTES,
    KEY,
    MAGIC,
    NAME_BYTES,
    SEALED_MAGIC,
    SECRET_BYTES,
    Address,
    Place,
    hello,
    read_hello,
    sealed_hello,
)
from kvrail.transport.tcp.sealed import Keys, SealedStream, name_of, new_salt
from kvrail.transport.tcp.stream import Stream, Wrap, plain

log = logging.getLogger(__name__)

_Found = tuple[TcpSender, Keys | None, Place]
"""Whom a hello names, the keys that follow from it, and which of the attempt's connections it is."""

MAX_UNPROVEN = 512
"""Connections that have not proved themselves yet. Beyond it, the host that has most of them loses its oldest one."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that the other end has.

    To accept a connection, to say its hello, to connect at all, to take a payload that waits, to read what is left.
    """

    connect_s: float = 10.0
    hello_s: float = 5.0
    come_s: float = 30.0
    silence_s: float = 60.0
    linger_s: float = 10.0


class TcpTransport:
    """Payloads in host memory over plain TCP connections. Belongs to one event loop.

    Each connection has one thread; a worker bounds its attempts, and thereby both.
    """

    def __init__(
        self, pool: RegionPool | None, timeouts: Timeouts, wrap: Wrap, connections: int, *, sealed: bool
    ) -> None:
        self._pool, self._timeouts, self._wrap, self._sealed = pool, timeouts, wrap, sealed
        self._connections = connections
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._address = b""
        self._listener: socket.socket | None = None
        self._senders: dict[int, TcpSender] = {}
        self._unproven: dict[asyncio.Task[bool], str] = {}  # their hosts; the oldest first
        self._leaving: set[asyncio.Task[bool]] = set()  # unproven ones that are being closed
        self._lingering: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        pool: RegionPool | None = None,
        *,
        host: str = "",
        port: int = 0,
        timeouts: Timeouts | None = None,
        wrap: Wrap = plain,
        connections: int = 1,
        sealed: bool = False,
    ) -> "TcpTransport":
        """Start a worker's end.

        It receives into `pool`, uint8 in host memory, if it has one. It sends if it has a `host` to listen on, at
        `port` or any free one; peers reach it there by the host of the gRPC port. connections: most that it opens for
        an attempt. sealed: payloads are encrypted, and both ends must want it so. Raises ConfigError where it cannot
        listen.
        """
        transport = cls(pool, timeouts or Timeouts(), wrap, connections, sealed=sealed)
        if host:
            transport._listener = await _listen(host, port)
            transport._address = Address(transport._listener.getsockname()[1], transport._secret).pack()
            transport._accepting = asyncio.create_task(transport._accept(transport._listener), name="data port")
        return transport

    @property
    def name(self) -> str:
        """`tcp`."""
        return "tcp"

    @property
    def address(self) -> bytes:
        """Where this end listens, with a secret; empty where it only receives. Tell it to peers over the call only."""
        return self._address

    @property
    def on_device(self) -> bool:
        """No."""
        return False

    @property
    def pool(self) -> RegionPool | None:
        """Where payloads land."""
        return self._pool

    async def sender(self, peer: Peer, key: int) -> TcpSender:
        """The sending end of attempt `key`, to which the receiver connects.

        Raises TransferAbortedError where the key is in use, ConfigError where this end does not listen.
        """
        if self._listener is None:
            raise ConfigError("this end has no data port to send from; give the transport a host to listen on")
        if key in self._senders:
            raise TransferAbortedError("the attempt's key is in use; the receiver draws a new one for each attempt")
        times = self._timeouts
        sender = TcpSender(lambda: self._forget(key, sender), self._linger, times.come_s, times.silence_s)
        self._senders[key] = sender
        return sender

    async def receiver(self, peer: Peer, key: int) -> TcpReceiver:
        """The receiving end of attempt `key`.

        Raises WorkerUnavailableError where the peer cannot be reached, ConfigError where this end has no pool.
        """
        if self._pool is None:
            raise ConfigError("this end has no memory to receive into; give the transport a pool")
        address = Address.of(peer)

        def open_there(place: Place) -> Awaitable[Connection]:
            return self._open(address, key, place)

        first = await open_there(Place(0, self._connections))
        return TcpReceiver(first, self._pool, self._connections, open_there)

    async def aclose(self) -> None:
        """Close the listener and every connection; lets receivers read what senders left, for a bounded time."""
        tasks: list[asyncio.Task[Any]] = [*self._unproven, *self._leaving]
        tasks += [self._accepting] if self._accepting else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for sender in list(self._senders.values()):
            await sender.aclose()
        await asyncio.gather(*self._lingering, return_exceptions=True)

    async def _open(self, address: Address, key: int, place: Place) -> Connection:
        """A connection of attempt `key`. Raises WorkerUnavailableError where there is no way to the address."""
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                sock = await _connect(address.host, address.port)
                stream = await self._wrap(sock, address.host)
                stream = self._greeted_by(stream, address.secret, key, place)
            return Connection(stream)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if not isinstance(error, OSError):  # which TimeoutError is
                raise
            raise WorkerUnavailableError(
                f"no data connection to {address.host}:{address.port}: {reason_of(error)}; is the prefill"
                " worker's data port reachable from here?"
            ) from error

    def _greeted_by(self, stream: Stream, secret: bytes, key: int, place: Place) -> Stream:
        """Say which attempt a new connection belongs to; returns what goes on with it."""
        if not self._sealed:
            stream.post(hello(secret, key, place))
            return stream
        salt = new_salt()
        stream.post(sealed_hello(name_of(secret, key, place), salt, place))
        return SealedStream(stream, Keys.derive(secret, key, salt), receiver=True)

    def _forget(self, key: int, sender: TcpSender) -> None:
        if self._senders.get(key) is sender:
            del self._senders[key]

    def _linger(self, connection: Connection) -> None:
        task = asyncio.create_task(connection.linger(self._timeouts.linger_s), name="data connection's end")
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, place = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is free, or the other end has left already
                log.warning("the data port accepted no connection: %s", reason_of(error))
                await asyncio.sleep(0.1)
                continue
            task = asyncio.create_task(self._greet(sock), name="data connection's hello")
            self._unproven[task] = place[0]
            task.add_done_callback(functools.partial(self._greeted, sock))
            if len(self._unproven) > MAX_UNPROVEN:
                self._make_room()

    def _make_room(self) -> None:
        """Close one unproven connection: the oldest one of the host that has most, since a real peer speaks at once."""
        hosts = Counter(self._unproven.values())
        crowd, _ = max(hosts.items(), key=lambda item: item[1])
        oldest = next(task for task, host in self._unproven.items() if host == crowd)
        del self._unproven[oldest]
        self._leaving.add(oldest)
        oldest.cancel()

    def _greeted(self, sock: socket.socket, task: asyncio.Task[bool]) -> None:
        self._unproven.pop(task, None)
        self._leaving.discard(task)
        if task.cancelled():
            sock.close()
        elif (error := task.exception()) is not None:
            sock.close()
            log.error("a data connection could not be taken", exc_info=error)
        elif not task.result():
            sock.close()

    async def _greet(self, sock: socket.socket) -> bool:
        """Hand a connection to the sender whose key it knows; says whether there was one.

        A connection that proves nothing costs a socket and no thread.
        """
        try:
            async with asyncio.timeout(self._timeouts.hello_s):
                said = await _first_bytes(sock, HELLO_BYTES)
                read = read_hello(SEALED_MAGIC if self._sealed else MAGIC, said)
                found = self._proven(*read) if read else None
                if found is None or not found[0].takes(found[2]):
                    return False
                stream = await self._wrap(sock, None)
        except OSError as error:
            log.debug("a data connection was closed before its hello: %s", reason_of(error))
            return False
        sender, keys, place = found
        if not sender.takes(place):  # another one came meanwhile
            return False
        sender.connect(place, Connection(stream if keys is None else SealedStream(stream, keys, receiver=False)))
        return True

    def _proven(self, proof: bytes, place: Place) -> _Found | None:
        """The sender that a hello names, and the keys by which what follows is encrypted, where it is."""
        if not self._sealed:
            secret, (key,) = proof[:SECRET_BYTES], KEY.unpack(proof[SECRET_BYTES:])
            known = hmac.compare_digest(secret, self._secret) and key in self._senders
            return (self._senders[key], None, place) if known else None
        name, salt = proof[:NAME_BYTES], proof[NAME_BYTES:]
        for key, sender in self._senders.items():
            if hmac.compare_digest(name_of(self._secret, key, place), name):
                return sender, Keys.derive(self._secret, key, salt), place
        return None


async def _listen(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = infos[0]
        listener = socket.create_server(place[:2], family=family, backlog=MAX_UNPROVEN)
    except OSError as error:
        raise ConfigError(
            f"cannot listen for data on {host}:{port}: {reason_of(error)}; choose another host or port"
        ) from error
    listener.setblocking(False)
    return listener


async def _first_bytes(sock: socket.socket, count: int) -> bytes:
    """The first bytes of a connection. Raises ConnectionError where it ends before."""
    sock.setblocking(False)
    said = b""
    while len(said) < count:
        more = await asyncio.get_running_loop().sock_recv(sock, count - len(said))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        said += more
    return said


async def _connect(host: str, port: int) -> socket.socket:
    """Connect to the first of the host's addresses that answers."""
    loop = asyncio.get_running_loop()
    failure = OSError("the host has no address")
    for family, kind, protocol, _, place in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure
