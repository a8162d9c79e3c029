"""What the router's Python does for one token, from the worker's event to the client's socket; no model, no torch.

    python -m benchmarks.token_path [--streams 1,8,64] [--step-ms 0] [--scrape-ms 0] [--rounds 3] [--json FILE]

A stub worker gives each stream a token a step, the real router passes them on, one client reads the events of all
streams; beside it, in turns, a bare asyncio proxy that copies events from sockets to HTTP chunks. With --step-ms 0 a
step follows the last one at once: the most tokens per second. With a step's time the load is the same for all, and the
CPU time for each token compares, as does the time from when a token was made to when the client has read it. With
--scrape-ms the router's /metrics is read so often meanwhile. Correctness first: each stream must bring exactly its
tokens and the end.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.facts import say
from benchmarks.token_path_stubs import MODEL

TOKENS = {1: 2000, 8: 1000}
"""Tokens of a stream, by number of streams; of more streams, MANY."""
MANY = 500
START_SECONDS = 60
MADE = re.compile(rb'"text":" (\d+)"')
"""When a token was made."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One run.

    tokens_per_s: all streams together. cpu_us: microseconds of CPU per token, of each process or thread. delay_ms: of
    tokens until the client has them, median and 99th percentile; none where steps follow each other at once.
    """

    server: str
    streams: int
    tokens_per_s: float
    cpu_us: dict[str, float]
    delay_ms: tuple[float, float] | None = None


@contextmanager
def process(*command: str, step_ms: float) -> Iterator[tuple[psutil.Process, int]]:
    """A stub process and its port."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.token_path_stubs", *command],
        stdout=subprocess.PIPE,
        env={**os.environ, "STEP_MS": str(step_ms)},
    )
    try:
        assert child.stdout is not None
        yield psutil.Process(child.pid), int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()


@contextmanager
def router(worker_port: int) -> Iterator[tuple[psutil.Process, int]]:
    """A router before the worker; ready when this is entered."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--decode-workers", f"127.0.0.1:{worker_port}", "--prefill-workers", ""]
    command = [sys.executable, "-m", "kvrail", "router", *flags, "--log-level", "warning"]
    child = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}/health"
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        break
            except (urllib.error.URLError, ConnectionError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the router is not ready after {START_SECONDS} s: {error}") from None
                time.sleep(0.1)
        yield psutil.Process(child.pid), port
    finally:
        child.terminate()
        child.wait()


class Reader(asyncio.Protocol):
    """Reads one answer and counts its events, with as little work as can be."""

    def __init__(self, port: int, tokens: int) -> None:
        self._request = _request(port, tokens)
        self._tail = b""
        self.events = 0
        self.delays_ns: list[int] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Count."""
        now = time.monotonic_ns()
        data = self._tail + data
        self.events += data.count(b"data: ")
        self.delays_ns += [now - int(made) for made in MADE.findall(data)]
        self._tail = data[-5:] if data[-5:] != b"data: "[:5] else b""
        if b"[DONE]" in data and not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the waiting task."""
        if not self.done.done():
            self.done.set_exception(ConnectionError("the answer broke off"))


def _request(port: int, tokens: int) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


async def read_answers(port: int, streams: int, tokens: int) -> tuple[float, list[int]]:
    """Seconds in which the answers came, and each token's delay in nanoseconds.

    Raises RuntimeError where an answer brought another number of tokens.
    """
    loop = asyncio.get_running_loop()
    begin = time.perf_counter()
    pairs = [await loop.create_connection(lambda: Reader(port, tokens), "127.0.0.1", port) for _ in range(streams)]
    await asyncio.gather(*(reader.done for _, reader in pairs))
    seconds = time.perf_counter() - begin
    for _, reader in pairs:
        if reader.events != tokens + 1:
            raise RuntimeError(f"an answer has {reader.events - 1} events for {tokens} tokens")
    return seconds, [delay for _, reader in pairs for delay in reader.delays_ns]


def cpu_of(child: psutil.Process) -> float:
    """Seconds of CPU of a process."""
    times = child.cpu_times()
    return times.user + times.system


def measure_http(
    server: str, port: int, processes: dict[str, psutil.Process], streams: int, rounds: int
) -> list[Figure]:
    """Runs of one server, after one that is not counted."""
    tokens = TOKENS.get(streams, MANY)
    asyncio.run(read_answers(port, streams, tokens // 4))
    figures = []
    for _ in range(rounds):
        before = {name: cpu_of(child) for name, child in processes.items()}
        seconds, delays_ns = asyncio.run(read_answers(port, streams, tokens))
        total = streams * tokens
        cpu = {name: (cpu_of(child) - before[name]) / total * 1e6 for name, child in processes.items()}
        hundredths = statistics.quantiles(delays_ns, n=100)
        figures.append(Figure(server, streams, total / seconds, cpu, (hundredths[49] / 1e6, hundredths[98] / 1e6)))
    return figures


@contextmanager
def scraped(port: int, every_ms: float) -> Iterator[None]:
    """Reads a router's metrics every `scrape_ms` milliseconds; 0: never."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(every_ms / 1e3):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                answer.read()

    thread = threading.Thread(target=scrape)
    if every_ms:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if every_ms:
            thread.join()


def run(streams: list[int], rounds: int, step_ms: float, scrape_ms: float) -> list[Figure]:
    """All figures; router and proxy take turns."""
    figures = []
    with ExitStack() as stack:
        worker, worker_port = stack.enter_context(process("worker", step_ms=step_ms))
        routing, router_port = stack.enter_context(router(worker_port))
        source, source_port = stack.enter_context(process("source", step_ms=step_ms))
        proxying, proxy_port = stack.enter_context(process("proxy", f"127.0.0.1:{source_port}", step_ms=step_ms))
        for count in streams:
            ours = {"router": routing, "stub worker": worker}
            bare = {"proxy": proxying, "source": source}
            for _ in range(rounds):
                with scraped(router_port, scrape_ms):
                    figures += measure_http("router", router_port, ours, count, 1)
                figures += measure_http("bare proxy", proxy_port, bare, count, 1)
    return figures


def table(figures: list[Figure]) -> str:
    """Medians, one row a server and number of streams."""
    lines = ["| server | streams | tokens/s | CPU µs per token | delay ms, median and p99 |", "|---|---|---|---|---|"]
    for server, streams in dict.fromkeys((figure.server, figure.streams) for figure in figures):
        rows = [figure for figure in figures if (figure.server, figure.streams) == (server, streams)]
        rate = statistics.median(row.tokens_per_s for row in rows)
        cpu = {name: statistics.median(row.cpu_us[name] for row in rows) for name in rows[0].cpu_us}
        shown = ", ".join(f"{name} {value:.0f}" for name, value in cpu.items())
        delays = [row.delay_ms for row in rows if row.delay_ms]
        delay = " / ".join(f"{statistics.median(part):.2f}" for part in zip(*delays, strict=True))
        lines.append(f"| {server} | {streams} | {rate:,.0f} | {shown} | {delay} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,64", help="numbers of streams, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step in milliseconds; 0: at once")
    parser.add_argument("--scrape-ms", type=float, default=0.0, help="milliseconds between scrapes; 0: none")
    parser.add_argument("--json", type=Path, help="also write every run here")
    arguments = parser.parse_args()
    say("benchmarks.token_path")
    streams = [int(part) for part in arguments.streams.split(",")]
    figures = run(streams, arguments.rounds, arguments.step_ms, arguments.scrape_ms)
    print(table(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
