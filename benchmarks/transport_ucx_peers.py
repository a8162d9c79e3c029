"""What the transport `ucx` is compared with: plain sockets, UCX's own benchmark, torch's copies between GPUs."""

import importlib.util
import multiprocessing
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvrail.transport.ucx import UcxSettings

MIB = 1 << 20
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Load:
    """What is sent in a round."""

    size: int
    count: int
    at_once: int


def the_payload(size: int, device: torch.device | None) -> torch.Tensor:
    """uint8 [size]; both processes make the same."""
    block = torch.frombuffer(bytearray(random.Random(0).randbytes(min(size, 1_000_003))), dtype=torch.uint8)
    payload = block.repeat(size // block.numel() + 1)[:size].contiguous()
    return payload if device is None else payload.to(device)


def socket_sender(load: Load, rounds: int, pipe: Connection) -> None:
    """One connection for each round, `sendall`."""
    payload = the_payload(load.size, None).numpy().data
    with socket.create_server((HOST, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        for _ in range(rounds):
            with listener.accept()[0] as connection:
                before = time.process_time()
                for _ in range(load.count):
                    connection.sendall(payload)
            pipe.send(time.process_time() - before)


def measure_sockets(load: Load, rounds: int) -> tuple[float, float]:
    """`recv_into` a region that is there, in one call for each payload."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=socket_sender, args=(load, rounds + 1, theirs), daemon=True)
    child.start()
    port, region = ours.recv(), torch.zeros(load.size, dtype=torch.uint8).numpy().data
    rates, costs, gigabytes = [], [], load.size * load.count / 1e9
    for _ in range(rounds + 1):
        with socket.create_connection((HOST, port)) as connection:
            cpu, begin = time.process_time(), time.perf_counter()
            for _ in range(load.count):
                connection.recv_into(region, load.size, socket.MSG_WAITALL)
            rates.append(gigabytes / (time.perf_counter() - begin))
            cpu = time.process_time() - cpu
        costs.append((cpu + ours.recv()) / gigabytes)
    child.join()
    return statistics.median(rates[1:]), statistics.median(costs[1:])


def perftest() -> str:
    """Where UCX's benchmark is; empty where it is not."""
    spec = importlib.util.find_spec("libucx")
    beside = Path(spec.origin).parent / "bin" / "ucx_perftest" if spec is not None and spec.origin else None
    return str(beside) if beside is not None and beside.exists() else shutil.which("ucx_perftest") or ""


def measure_perftest(program: str, settings: UcxSettings, load: Load, mode: str) -> tuple[float, float]:
    """UCX's own tag_bw with the transport's settings."""
    variables = {f"UCX_{name}": value for name, value in settings.config(on_device=False).items()}
    library = str(Path(program).parent.parent / "lib")
    env = {**os.environ, **variables, "LD_LIBRARY_PATH": library, "UCX_WARN_UNUSED_ENV_VARS": "n"}
    with socket.create_server((HOST, 0)) as free:
        port = str(free.getsockname()[1])
    common = [program, "-p", port, "-E", mode]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    server = subprocess.Popen(common, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1)
    what = ["-t", "tag_bw", "-s", str(load.size), "-n", str(load.count), "-w", "2", "-f", HOST]
    try:
        found = subprocess.run([*common, *what], env=env, capture_output=True, text=True, timeout=120, check=True)
        server.wait(10)
    finally:
        server.kill()
        server.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    columns = found.stdout.strip().splitlines()[-1].split()
    return float(columns[5]) * MIB / 1e9, cpu / (load.size * (load.count + 2) / 1e9)


def measure_copy(load: Load, rounds: int) -> tuple[float, float]:
    """torch's copy between the GPUs, as many at once: they queue on one stream."""
    source = the_payload(load.size, torch.device("cuda", 1))
    target = torch.empty_like(source, device="cuda:0")
    rates, gigabytes = [], load.size * load.count / 1e9
    for _ in range(rounds + 2):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        begin = time.perf_counter()
        for number in range(load.count):
            target.copy_(source, non_blocking=True)
            if (number + 1) % load.at_once == 0:
                torch.cuda.synchronize(0)
                torch.cuda.synchronize(1)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        rates.append(gigabytes / (time.perf_counter() - begin))
    if not torch.equal(target.cpu(), source.cpu()):
        raise SystemExit("copy_ brought other bytes")
    return statistics.median(rates[2:]), float("nan")
