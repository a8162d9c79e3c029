"""One TCP connection as blocking threads use it. Any end or stall of it is an OSError."""

import contextlib
import math
import socket
import struct
from collections.abc import Awaitable, Callable
from time import monotonic

STALL_S = 30.0
"""A payload without progress for this long ends its connection; so does a host that does not answer for this long."""

_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", int(STALL_S * 1e3)))
"""Options by name, as not every system has all: seconds, and milliseconds for the last."""


class Stream:
    """A connected socket. One thread calls `send`, `receive` and `read_to_end`; any thread the others."""

    def __init__(self, sock: socket.socket, *, stall_s: float = STALL_S) -> None:
        # Buffers keep the kernel's own sizes: what is set is held to net.core.[rw]mem_max, often 208 KiB, and grows no
        # more; 1 and 4 MiB gained nothing where they were allowed.
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        limit = struct.pack("@ll", int(stall_s), int(stall_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # the kernel's own: Python's would poll at each call
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        self._sock = sock
        self._stall_s = stall_s

    def send(self, *parts: memoryview) -> None:
        """Send all of `parts`, one after the other."""
        left = [part for part in parts if part.nbytes]
        while left:
            try:
                sent = self._sock.sendmsg(left)
            except BlockingIOError as error:
                raise self._stalled() from error
            left = _without(left, sent)

    def receive(self, *parts: memoryview, begun: bool = False, silence_s: float = math.inf) -> None:
        """Fill all of `parts`, one after the other.

        Waits at most `silence_s` seconds for the first byte, or `stall_s` more; for each further one `stall_s`.
        begun: these bytes belong to a payload that has begun to come, so that a pause before them is a stall too.
        """
        left, began = [part for part in parts if part.nbytes], monotonic()
        while left:
            try:
                got = self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                if begun:
                    raise self._stalled() from error
                if monotonic() - began >= silence_s:
                    raise TimeoutError(f"the other end took nothing for {silence_s:g} s") from error
                continue
            if not got:
                raise ConnectionResetError("the other end closed the connection")
            begun = True
            left = _without(left, got)

    def post(self, message: bytes) -> None:
        """Send a few bytes without waiting, beside a thread that receives."""
        if self._sock.send(message, socket.MSG_DONTWAIT) != len(message):
            raise BlockingIOError("the other end takes no more messages")

    def read_to_end(self) -> None:
        """Send the end, then discard what comes until the other end has closed.

        A close before that, with something left to read here, would discard what the other end has not read yet.
        """
        self._sock.shutdown(socket.SHUT_WR)
        scrap = bytearray(4096)
        with contextlib.suppress(BlockingIOError):
            while self._sock.recv_into(scrap):
                pass

    def end_sending(self) -> None:
        """Nothing more is sent; what was sent still arrives."""
        self._sock.shutdown(socket.SHUT_WR)

    def shutdown(self) -> None:
        """End the connection; a thread that blocks in it returns at once."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Give the socket back to the system; no thread uses it any more. What has not left by now is discarded.

        The other end gets a reset. The end that `shutdown` sends is not enough: with a closed window, a sender
        notices it only in an answer to data, and sends none; Linux leaves its probes unanswered for a minute.
        """
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        self._sock.close()

    def _stalled(self) -> TimeoutError:
        return TimeoutError(f"the other end made no progress for {self._stall_s:g} s in the middle of a payload")


def _without(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `parts` without their first `count` bytes."""
    while parts and count >= parts[0].nbytes:
        count -= parts[0].nbytes
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if count else parts


Wrap = Callable[[socket.socket, str | None], Awaitable[Stream]]
"""Makes a stream of a socket that was connected to a host, or accepted from one (None).

It has as long as opening a connection may take; past that it is cancelled and the socket closed.
"""


async def plain(sock: socket.socket, host: str | None) -> Stream:
    """A stream with the usual bounds."""
    return Stream(sock)
