"""What the transport `ucx` reaches, beside UCX's own benchmark and plain sockets; between two GPUs with --cuda.

    python -m benchmarks.transport_ucx [--mib 1 16 64 256] [--transports tcp,self tcp,cma,self] [--rounds 5]
    python -m benchmarks.transport_ucx --cuda [--mib 8 64 512]        two GPUs, 85 s at most

Two processes, payloads compared first. A round goes from the first receive to the last payload; figures are medians.
`at once` is how many payloads are under way. CPU seconds per GB are of all threads of both processes.
`bare` is UCXX with the transport's settings and neither sizes, acknowledgements nor regions. `ucx_perftest` comes with
libucx's wheel or Debian's ucx-utils; it polls unless set to sleep. `copy_` is torch's, from one GPU to the other. By
default workers on GPUs poll, and others sleep.
"""

import argparse
import asyncio
import multiprocessing
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.facts import say
from benchmarks.transport_ucx_peers import (
    HOST,
    MIB,
    Load,
    measure_copy,
    measure_perftest,
    measure_sockets,
    perftest,
    the_payload,
)
from kvrail.transport.base import Payload, Peer
from kvrail.transport.regions import host_pool
from kvrail.transport.ucx import UcxSettings, UcxTransport, available
from kvrail.transport.ucx.worker import UcxWorker

LOOPBACK = {"NET_DEVICES": "lo"}
LIMIT_S = 85


def unavailable() -> str:
    """Why nothing of this can run; for benchmarks.transport."""
    return available()


async def start_transport(pool_bytes: int) -> UcxTransport:
    """A transport with its defaults; for benchmarks.transport."""
    return await UcxTransport.start(pool=host_pool(pool_bytes))


@dataclass(frozen=True)
class Road:
    """One row: what moves payloads, how UCX is set, and whether they lie on a GPU."""

    name: str
    settings: UcxSettings
    bare: bool = False
    cuda: bool = False


def as_payload(tensor: torch.Tensor) -> Payload:
    """As payloads are handed to transports."""
    return tensor if tensor.is_cuda else tensor.numpy().data


async def in_turns(load: Load, one: Callable[[int], Awaitable[None]]) -> None:
    """Run `one` for each payload, `at_once` of them at a time."""
    left = iter(range(load.count))

    async def turn() -> None:
        for number in left:
            await one(number)

    await asyncio.gather(*(turn() for _ in range(load.at_once)))


class TransportEnd:
    """Either end, by the transport."""

    def __init__(self, transport: UcxTransport, cuda: bool) -> None:
        self._transport, self._cuda = transport, cuda
        self.address = transport.address

    async def send(self, peer: bytes, key: int, payload: torch.Tensor, load: Load, ready: Callable[[], None]) -> None:
        """Send it so often."""
        payload_sender = await self._transport.sender(Peer(peer, HOST), key)
        ready()
        await asyncio.gather(*(payload_sender.send(as_payload(payload)) for _ in range(load.count)))
        await payload_sender.aclose()

    async def receive(self, peer: bytes, key: int, load: Load, want: torch.Tensor | None) -> None:
        """Receive, and compare where asked."""
        payload_receiver = await self._transport.receiver(Peer(peer, HOST), key)

        async def one(number: int) -> None:
            region = await payload_receiver.receive(load.size, on_device=self._cuda)
            if want is not None and not torch.equal(region.tensor, want):
                raise SystemExit(f"payload {number} of {load.size} bytes arrived with other bytes")
            region.release()

        await in_turns(load, one)
        await payload_receiver.aclose()

    async def aclose(self) -> None:
        """End it."""
        await self._transport.aclose()


class BareEnd:
    """Either end, by UCXX alone."""

    def __init__(self, worker: UcxWorker, settings: UcxSettings, regions: list[torch.Tensor]) -> None:
        self._worker, self._settings, self._regions = worker, settings, regions
        self._endpoints: dict[bytes, Any] = {}
        self.address = worker.address

    def _endpoint(self, peer: bytes) -> Any:
        if peer not in self._endpoints:
            self._endpoints[peer] = self._worker.connect(peer, peer_failure=self._settings.peer_failure)
        return self._endpoints[peer]

    async def send(self, peer: bytes, key: int, payload: torch.Tensor, load: Load, ready: Callable[[], None]) -> None:
        """Send it so often."""
        endpoint = self._endpoint(peer)
        ready()
        buffer = payload if payload.is_cuda else payload.numpy()
        await asyncio.gather(*(self._worker.send(endpoint, buffer, key) for _ in range(load.count)))

    async def receive(self, peer: bytes, key: int, load: Load, want: torch.Tensor | None) -> None:
        """Receive, and compare where asked."""
        endpoint, regions = self._endpoint(peer), list(self._regions)

        async def one(number: int) -> None:
            region = regions.pop()
            room = region[: load.size]
            await self._worker.receive(endpoint, room if room.is_cuda else room.numpy(), key)
            if want is not None and not torch.equal(room, want):
                raise SystemExit(f"payload {number} of {load.size} bytes arrived with other bytes")
            regions.append(region)

        await in_turns(load, one)

    async def aclose(self) -> None:
        """End it."""
        for endpoint in self._endpoints.values():
            await asyncio.to_thread(endpoint.close_blocking, 1_000_000_000, 1)
        self._endpoints.clear()
        await self._worker.aclose()


async def start(road: Road, device: torch.device | None, load: Load) -> TransportEnd | BareEnd:
    """An end with room for what is under way at once."""
    room = (load.size + 4096) * load.at_once
    if not road.bare:
        host, on_device = (room, 0) if device is None else (MIB, room)
        transport = await UcxTransport.start(
            pool=host_pool(host, pinned=device is not None),
            device=device,
            device_bytes=on_device,
            settings=road.settings,
        )
        if road.cuda and not transport.on_device:
            raise SystemExit("UCX has no CUDA here")
        transport.pools.host.buffer.zero_()  # every page is there
        return TransportEnd(transport, road.cuda)
    regions = [torch.zeros(load.size, dtype=torch.uint8, device=device) for _ in range(load.at_once)]
    return BareEnd(UcxWorker(road.settings, device), road.settings, regions)


def device_of(road: Road, index: int) -> torch.device | None:
    """GPU 0 receives, GPU 1 sends."""
    if not road.cuda:
        return None
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


async def serve(pipe: Connection) -> None:
    """The sender's process: one end after another, as the other process orders."""
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        road, load, peer_rounds = order
        device = device_of(road, 1)
        end = await start(road, device, load)
        payload = the_payload(load.size, device)
        if device is not None:
            torch.cuda.synchronize(device)
        pipe.send(end.address)
        peer = await asyncio.to_thread(pipe.recv)
        for key in range(peer_rounds):
            await asyncio.to_thread(pipe.recv)
            before = time.process_time()
            await end.send(peer, key_of(key), payload, load, lambda: pipe.send("ready"))
            pipe.send(time.process_time() - before)
        await end.aclose()
        pipe.send("closed")


def serve_in_child(pipe: Connection) -> None:
    """Run `serve` in an event loop of its own."""
    asyncio.run(serve(pipe))


def key_of(number: int) -> int:
    """Keys like drawn ones."""
    return random.Random(number).getrandbits(64)


async def measure(road: Road, load: Load, rounds: int, pipe: Connection) -> tuple[float, float]:
    """GB/s and CPU seconds per GB, medians of rounds; the first round compares, the second warms."""
    device = device_of(road, 0)
    pipe.send((road, load, rounds + 2))
    end = await start(road, device, load)
    peer = await asyncio.to_thread(pipe.recv)
    pipe.send(end.address)
    want = the_payload(load.size, device)
    rates, costs, gigabytes = [], [], load.size * load.count / 1e9
    for number in range(rounds + 2):
        pipe.send("go")
        await asyncio.to_thread(pipe.recv)
        cpu, begin = time.process_time(), time.perf_counter()
        await end.receive(peer, key_of(number), load, want if number == 0 else None)
        took, cpu = time.perf_counter() - begin, time.process_time() - cpu
        cpu += await asyncio.to_thread(pipe.recv)
        rates.append(gigabytes / took)
        costs.append(cpu / gigabytes)
    if device is not None:
        torch.cuda.synchronize(device)
    await asyncio.gather(end.aclose(), asyncio.to_thread(pipe.recv))
    return statistics.median(rates[2:]), statistics.median(costs[2:])


@asynccontextmanager
async def sender_process() -> AsyncIterator[Connection]:
    """The other process."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=serve_in_child, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
        await asyncio.to_thread(child.join, 10)
    finally:
        child.kill()


def show(name: str, load: Load, figures: tuple[float, float], best: float | None = None) -> None:
    """A line of the table; `share` is of the first row of its load."""
    share = f"{figures[0] / best:>8.2f}" if best else f"{'':>8}"
    cost = f"{figures[1]:>12.3f}"
    print(f"{name:<34}{load.size / MIB:>6g}{load.at_once:>9}{figures[0]:>9.2f}{share}{cost}", flush=True)


def head(share: str) -> None:
    """The table's head."""
    print(f"{'':<34}{'MiB':>6}{'at once':>9}{'GB/s':>9}{share:>8}{'CPU s/GB':>12}", flush=True)


async def on_loopback(options: argparse.Namespace) -> None:
    """Host memory, both processes on this host."""
    say("benchmarks.transport_ucx")
    head("/socket")
    async with sender_process() as pipe:
        for mib in options.mib or [1, 16, 64, 256]:
            load = Load(mib * MIB, max(4, options.total_mib // mib), 2)
            plain = measure_sockets(load, options.rounds)
            show("plain socket", load, plain)
            for transports in options.transports:
                settings = UcxSettings(transports=transports, extra=LOOPBACK)
                road = Road(f"transport {transports}", settings)
                show(road.name, load, await measure(road, load, options.rounds, pipe), plain[0])
                bare = replace(road, name=f"bare {transports}", bare=True)
                show(bare.name, load, await measure(bare, load, options.rounds, pipe), plain[0])
                for mode in ("poll", "sleep") if (program := perftest()) else ():
                    figures = await asyncio.to_thread(measure_perftest, program, settings, load, mode)
                    show(f"ucx_perftest ({mode}) {transports}", load, figures, plain[0])


async def between_gpus(options: argparse.Namespace) -> None:
    """Device memory, from GPU 1 to GPU 0."""
    if torch.cuda.device_count() < 2:
        raise SystemExit(f"--cuda needs two GPUs, here are {torch.cuda.device_count()}")
    say("benchmarks.transport_ucx", "cuda")
    sleeping, polling = UcxSettings(), UcxSettings(spin=True)
    roads = [
        Road("transport, sleeping", sleeping, cuda=True),
        Road("transport, polling", polling, cuda=True),
        Road("bare, sleeping", sleeping, bare=True, cuda=True),
        Road("bare, deaths go unnoticed", replace(sleeping, peer_failure=False), bare=True, cuda=True),
    ]
    signal.alarm(LIMIT_S)
    head("/copy_")
    async with sender_process() as pipe:
        for mib in options.mib or [8, 64, 512]:
            for at_once in (1, 4, 8):
                load = Load(mib * MIB, max(8, 4096 // mib // 8 * 8), at_once)
                copy = await asyncio.to_thread(measure_copy, load, 3)
                show("copy_", load, copy)
                for road in roads:
                    show(road.name, load, await measure(road, load, 3, pipe), copy[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+")
    parser.add_argument("--total-mib", type=int, default=2048, help="a round's bytes, on loopback")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transports", nargs="+", default=["tcp,self", "tcp,cma,self"])
    parser.add_argument("--cuda", action="store_true", help="between two GPUs")
    options = parser.parse_args()
    if why := available():
        raise SystemExit(why)
    asyncio.run(between_gpus(options) if options.cuda else on_loopback(options))


if __name__ == "__main__":
    main()
