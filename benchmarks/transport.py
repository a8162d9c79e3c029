"""Throughput of the transports on loopback, and what they cost: the sender is another process.

    python -m benchmarks.transport [--mib 1 16 64] [--total-mib 2048] [--rounds 5] [--engine [sender] [receiver]]
                                   [--only NAME ...]

Correctness first: a round compares every payload with what was sent. The timed rounds then run from the opening of an
attempt to its last payload.  `bare socket` and
`bare grpc.aio` are bounds: one connection or stream that does nothing else. CPU seconds per GB are those of all threads
of the sender's and of the receiver's process. With `--engine` a thread in the named processes does small torch
operations; the last columns say how many it does per second while payloads travel, of those that it does while none do.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.facts import say
from benchmarks.transport_ends import Check, EngineLikeThread, Road, roads

ALONE_S = 1.0


@dataclass(frozen=True)
class Meter:
    """A process at one moment: CPU seconds without the engine-like thread, that one's steps, the clock."""

    cpu_s: float
    steps: int
    at_s: float

    @classmethod
    def read(cls, engine: EngineLikeThread | None) -> "Meter":
        """This process, now."""
        busy, steps = (engine.cpu_s, engine.steps) if engine else (0.0, 0)
        return cls(time.process_time() - busy, steps, time.perf_counter())

    def cpu_since(self, before: "Meter") -> float:
        """CPU seconds in between."""
        return self.cpu_s - before.cpu_s

    def steps_since(self, before: "Meter") -> float:
        """Steps per second in between."""
        return (self.steps - before.steps) / (self.at_s - before.at_s)


def the_payload(size: int) -> memoryview:
    """What every round sends; both processes make the same."""
    block = random.Random(0).randbytes(min(size, 1_000_003))
    return memoryview((block * (size // len(block) + 1))[:size])


def started_engine(wanted: bool) -> EngineLikeThread | None:
    """The thread, in its stride."""
    if not wanted:
        return None
    engine = EngineLikeThread()
    engine.start()
    while engine.steps < 100:
        time.sleep(0.01)
    return engine


async def serve(road: Road, size: int, engine: bool, pipe: Connection) -> None:
    """A sender that another process directs."""
    thread = started_engine(engine)
    async with road.sender(size) as sender:
        pipe.send(sender.address)
        payload = the_payload(size)
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            if order == "meter":
                pipe.send(Meter.read(thread))
                continue
            peer, key, count = order
            await sender.send(peer, key, payload, count, lambda: pipe.send("ready"))
            pipe.send("sent")
    if thread:
        thread.stop()


def serve_in_child(name: str, size: int, engine: bool, pipe: Connection) -> None:
    """Run `serve` in an event loop of its own."""
    (road,) = (road for road in roads() if road.name == name)
    asyncio.run(serve(road, size, engine, pipe))


class RemoteSender:
    """A sender in another process."""

    def __init__(self, pipe: Connection, address: bytes) -> None:
        self._pipe, self.address = pipe, address

    async def begin(self, peer: bytes, key: int, count: int) -> asyncio.Task[None]:
        """Start to send; the task ends with it."""
        self._pipe.send((peer, key, count))
        await self._hear("ready")
        return asyncio.create_task(self._hear("sent"))

    async def meter(self) -> Meter:
        """That process, now."""
        self._pipe.send("meter")
        answer = await asyncio.to_thread(self._pipe.recv)
        if not isinstance(answer, Meter):
            raise TypeError(f"the sender's process answered {answer!r}")
        return answer

    async def _hear(self, word: str) -> None:
        if (reply := await asyncio.to_thread(self._pipe.recv)) != word:
            raise SystemExit(f"the sender's process said {reply!r} instead of {word!r}")


@asynccontextmanager
async def sender_of(road: Road, size: int, engine: bool) -> AsyncIterator[RemoteSender]:
    """A road's sender, where it belongs."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=serve_in_child, args=(road.name, size, engine, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield RemoteSender(ours, await asyncio.to_thread(ours.recv))
        ours.send(None)
    finally:
        child.join(10)
        child.kill()


@dataclass
class Figures:
    """What was measured of one road and one size."""

    rates: list[float]
    sender_cpu: list[float]
    receiver_cpu: list[float]
    sender_engine: list[float]
    receiver_engine: list[float]

    def row(self, name: str, mib: float) -> str:
        """A line of the table."""

        def cell(values: list[float]) -> str:
            return f"{statistics.median(values):>10.2f}" if values else f"{'-':>10}"

        rates = f"{statistics.median(self.rates):>9.2f}{min(self.rates):>9.2f}{max(self.rates):>9.2f}"
        cells = (self.sender_cpu, self.receiver_cpu, self.sender_engine, self.receiver_engine)
        return f"{name:<16}{mib:>6g}{rates}" + "".join(map(cell, cells))


async def measure(road: Road, size: int, count: int, rounds: int, engines: list[str]) -> Figures:
    """Compare, then time."""
    figures, want = Figures([], [], [], [], []), the_payload(size)

    def compare(arrived: memoryview) -> None:
        if bytes(arrived) != want:
            raise SystemExit(f"{road.name}: a payload arrived with other bytes")

    engine = started_engine("receiver" in engines)
    async with (
        road.receiver(size) as receiver,
        sender_of(road, size, "sender" in engines) as sender,
    ):

        async def one_round(key: int, check: Check) -> None:
            sending = await sender.begin(receiver.address, key, count)
            await receiver.receive(sender.address, key, size, count, check)
            await sending

        await one_round(0, compare)
        for key in range(1, rounds + 1):
            idle = await sender.meter(), Meter.read(engine)
            if engines:
                await asyncio.sleep(ALONE_S)
            begin = await sender.meter(), Meter.read(engine)
            await one_round(key, lambda arrived: None)
            end = Meter.read(engine), await sender.meter()
            add(figures, idle, begin, (end[1], end[0]), count * size / 1e9)
    if engine:
        engine.stop()
    return figures


Meters = tuple[Meter, Meter]
"""The sender's process and this one."""


def add(figures: Figures, idle: Meters, begin: Meters, end: Meters, gigabytes: float) -> None:
    """One round more."""
    figures.rates.append(gigabytes / (end[1].at_s - begin[1].at_s))
    columns = ((figures.sender_cpu, figures.sender_engine), (figures.receiver_cpu, figures.receiver_engine))
    for (cpu, slowed), before, first, last in zip(columns, idle, begin, end, strict=True):
        cpu.append(last.cpu_since(first) / gigabytes)
        if last.steps:
            slowed.append(last.steps_since(first) / first.steps_since(before))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64])
    parser.add_argument("--total-mib", type=float, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", nargs="*", choices=["sender", "receiver"], help="both without a name")
    parser.add_argument("--only", nargs="+", help="names of roads")
    options = parser.parse_args()
    engines = ["sender", "receiver"] if options.engine == [] else options.engine or []
    say("benchmarks.transport")
    print(f"{options.total_mib:g} MiB a round, {options.rounds} rounds; GB/s, CPU s per GB, share of an engine's steps")
    print(f"{'':<16}{'MiB':>6}{'median':>9}{'min':>9}{'max':>9}", end="")
    print("".join(f"{head:>10}" for head in ("CPU send", "CPU recv", "eng. send", "eng. recv")))
    for mib in options.mib:
        size = int(mib * (1 << 20))
        count = max(2, round(options.total_mib / mib))
        for road in roads():
            if options.only and road.name not in options.only:
                continue
            figures = await measure(road, size, count, options.rounds, engines)
            print(figures.row(road.name, mib), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
