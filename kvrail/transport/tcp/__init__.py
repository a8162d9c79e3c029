"""Payloads over plain TCP connections: the transport for hosts without UCX. It needs nothing but Python.

Each attempt has its own connections: one, and up to three more once a payload has a MiB for each. The receiver opens
them, and proves itself on each with the attempt's key and a secret that only the handshake carries. All numbers are
big-endian.

    receiver                                     sender
    hello: magic, secret, key, place ──────────▶ the key's sender; unknown: closed
    grant: size (a region is there) ───────────▶
    payload's size, its first part ◀════════════ if the sizes are equal; else the size alone, and the end
    another part ◀══════════════════════════════ by each further connection

A payload leaves only once its region is there, so if a connection stalls in the middle of one, the peer has stalled.
Each connection has a thread of its own, which blocks in the kernel without the interpreter's lock: one system call for
a payload at the receiver, two at the sender (docs/decisions/0015-payloads-beside-grpc.md).
"""

from kvrail.runtime.limits import usable_cores
from kvrail.transport.registry import TransportInfo, TransportOptions
from kvrail.transport.tcp.messages import MOST_CONNECTIONS
from kvrail.transport.tcp.transport import TcpTransport, Timeouts

__all__ = ["TRANSPORT", "TcpTransport", "Timeouts"]


async def _start(options: TransportOptions) -> TcpTransport:
    return await TcpTransport.start(
        options.pool,
        host=options.host,
        port=options.port,
        timeouts=Timeouts(silence_s=options.silence_s),
        connections=max(1, min(MOST_CONNECTIONS, usable_cores() // 2)),  # the other end may be on the same machine
        sealed=options.encrypt,
    )


TRANSPORT = TransportInfo("tcp", _start, encrypts=True)
