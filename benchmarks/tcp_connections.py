"""What several TCP connections between two processes move in all, plain and encrypted, without an engine.

    python -m benchmarks.tcp_connections [--gib 2] [--connections 1,4,16] [--segment-kib 256,1024,8192] [--busy]

Each connection has a thread at either end and carries payloads of 16 MiB from memory to memory. --busy: a thread of the
receiving process never gives the interpreter's lock up by itself; it changes hands every 0.5 ms.
"""

import argparse
import multiprocessing
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter

from kvrail.transport.tcp import sealed
from kvrail.transport.tcp.stream import Stream

PAYLOAD_BYTES = 16 << 20
KEYS = sealed.Keys(bytes(32), bytes([1]) * 32)
BUSY_INTERVAL_S = 0.0005


def side_by_side(works: Sequence[Callable[[], None]]) -> float:
    """Seconds until all have ended, each in a thread."""
    begin = perf_counter()
    with ThreadPoolExecutor(len(works)) as pool:
        for work in [pool.submit(each) for each in works]:
            work.result()
    return perf_counter() - begin


def stream_of(sock: socket.socket, segment: int, receiver: bool) -> Stream:
    """One end of a connection; segment: bytes, 0 for plain ones."""
    if not segment:
        return Stream(sock)
    sealed.SEGMENT_BYTES = segment
    return sealed.SealedStream(Stream(sock), KEYS, receiver=receiver)


def receive(port: int, connections: int, payloads: int, segment: int, busy: bool) -> None:
    """The receiving process."""
    if busy:
        sys.setswitchinterval(BUSY_INTERVAL_S)
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()

    def work() -> None:
        stream = stream_of(socket.create_connection(("127.0.0.1", port)), segment, True)
        payload = memoryview(bytearray(PAYLOAD_BYTES))
        for _ in range(payloads):
            stream.receive(payload)
        stream.close()

    side_by_side([work] * connections)


def rate(connections: int, payloads: int, segment: int, busy: bool) -> float:
    """Bytes a second over all connections, from the last one's opening to the last one's end."""
    with socket.create_server(("127.0.0.1", 0), backlog=connections) as listener:
        arguments = (listener.getsockname()[1], connections, payloads, segment, busy)
        receiver = multiprocessing.get_context("spawn").Process(target=receive, args=arguments)
        receiver.start()
        socks = [listener.accept()[0] for _ in range(connections)]

    def work(sock: socket.socket) -> None:
        stream = stream_of(sock, segment, False)
        payload = memoryview(bytearray(PAYLOAD_BYTES))
        for _ in range(payloads):
            stream.send(payload)
        with suppress(OSError):  # the receiver closes with a reset
            stream.read_to_end()

    seconds = side_by_side([partial(work, sock) for sock in socks])
    receiver.join()
    return connections * payloads * PAYLOAD_BYTES / seconds


def numbers(text: str) -> list[int]:
    """A list of numbers, by commas."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Print a row for each number of connections."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--connections", type=numbers, default=[1, 4, 16])
    parser.add_argument("--segment-kib", type=numbers, default=[256, 1024, 8192])
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    sys.stdout.write(f"GB/s in all: plain, then encrypted in segments of {args.segment_kib} KiB\n")
    for connections in args.connections:
        payloads = max(1, int(args.gib * (1 << 30)) // PAYLOAD_BYTES // connections)
        row = [rate(connections, payloads, kib << 10, args.busy) for kib in (0, *args.segment_kib)]
        sys.stdout.write(f"{connections:3}  {'  '.join(f'{each / 1e9:.2f}' for each in row)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
