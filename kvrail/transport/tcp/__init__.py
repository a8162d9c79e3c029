"""Payloads over plain TCP connections: the transport for hosts without UCX. It needs nothing but Python.

Each attempt has one connection. The receiver opens it, and proves itself with the attempt's key and a secret that only
the handshake carries. All numbers are big-endian.

    receiver                                     sender
    hello: magic, secret, key ─────────────────▶ the key's sender; unknown: closed
    grant: size (a region is there) ───────────▶
    payload's size, payload ◀═══════════════════ if the sizes are equal; else the size alone, and the end

A payload leaves only once its region is there, so if a connection stalls in the middle of one, the peer has stalled.
Each connection has a thread of its own, which blocks in the kernel without the interpreter's lock: one system call for
a payload at the receiver, two at the sender (docs/decisions/0015-payloads-beside-grpc.md).
"""

from kvrail.transport.registry import TransportInfo, TransportOptions
from kvrail.transport.tcp.transport import TcpTransport, Timeouts

__all__ = ["TRANSPORT", "TcpTransport", "Timeouts"]


async def _start(options: TransportOptions) -> TcpTransport:
    times = Timeouts(silence_s=options.silence_s)
    return await TcpTransport.start(
        options.pool, host=options.host, port=options.port, timeouts=times, sealed=options.encrypt
    )


TRANSPORT = TransportInfo("tcp", _start, encrypts=True)
