"""What `kvrail up` starts: one router and the workers, with their ports, devices and threads. Nothing runs yet."""

import os
import random
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvrail.cli.checks import check_model, check_worker
from kvrail.cli.cluster.gpus import shared_kv_memory_gib
from kvrail.cli.flags import flag_arguments
from kvrail.config.settings import (
    BothSettings,
    DecodeSettings,
    PrefillSettings,
    RouterSettings,
    UpSettings,
    WorkerSettings,
)
from kvrail.errors import ConfigError
from kvrail.runtime.limits import usable_cores
from kvrail.telemetry.tracing import check_tracing
from kvrail.values.kv_cache import EXACT_FORMS

LOOPBACK = "127.0.0.1"
WORKER_PORTS = range(20_000, 32_768)
"""Below the ports that Linux gives to outgoing connections: none of these takes one before its worker has started."""
CHOSEN = frozenset({"host", "port", "metrics_port", "device", "prefill_workers", "decode_workers", "workers"})
"""Settings of a service that the plan fills in; as flags, these names concern `kvrail up` itself or the router."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the cluster: how it is started, and where it says how it is (url + /health, /metrics)."""

    name: str
    command: tuple[str, ...]
    url: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """All processes, the router first."""

    processes: tuple[Process, ...]
    router: RouterSettings
    startup_timeout_s: float
    restarts: int
    device: str

    @property
    def url(self) -> str:
        """Where clients find the router."""
        return self.processes[0].url


@dataclass(frozen=True, slots=True)
class _Worker:
    role: str
    index: int
    settings: WorkerSettings
    device: str
    port: int
    metrics_port: int


def plan_cluster(flags: Mapping[str, object], config: Path | None, gpus: list[str], held: ExitStack) -> Cluster:
    """Decide ports, devices and threads.

    flags: by field name, as given on the command line. gpus: what CUDA shows, in its order. held: keeps the ports for
    the cluster's processes until it closes; another cluster on this machine chooses others.
    Raises ConfigError where a setting is wrong, the router's port is taken, or a GPU is asked for and there is none.
    """
    up = UpSettings.load(_of(UpSettings, flags), config)
    router_flags = {name: flags[name] for name in ("host", "port") if name in flags} | _handed(RouterSettings, flags)
    router = RouterSettings.load(router_flags, config)
    roles: list[tuple[str, int, WorkerSettings]] = []
    for role, cls, count in (
        ("prefill", PrefillSettings, up.prefill_workers),
        ("decode", DecodeSettings, up.decode_workers),
        ("worker", BothSettings, up.workers),
    ):
        settings = cls.load(_handed(cls, flags), config)
        check_model(settings.model)
        check_worker(settings)
        check_tracing(settings.otlp_endpoint)
        roles += [(role, index, settings) for index in range(count)]
    check_model(router.model)
    check_tracing(router.otlp_endpoint)
    device = resolve_device(up.device, gpus)
    devices = place(device, len(roles), len(gpus))
    http_port = _reserve(held, router.host, router.port)
    first = up.metrics_port if router.port else 0
    own = [first + number if first else 0 for number in range(len(roles))]
    ports = [(_reserve(held, LOOPBACK, 0), _reserve(held, LOOPBACK, port, "--metrics-port")) for port in own]
    workers = [_Worker(*role, on, *pair) for role, on, pair in zip(roles, devices, ports, strict=True)]
    processes = [_router_process(router, router_flags, http_port, workers, config)]
    for worker in workers:
        sharing = devices.count(worker.device)
        processes.append(_worker_process(worker, flags, config, len(workers), _memory(worker, sharing, gpus)))
    return Cluster(tuple(processes), router, up.startup_timeout_s, up.restarts, device)


def resolve_device(device: str, gpus: list[str]) -> str:
    """`device` with auto decided: cuda where there are `gpus`, else cpu. Raises ConfigError for cuda without any."""
    if device == "cuda" and not gpus:
        raise ConfigError("--device: cuda was asked for and no NVIDIA GPU is visible; use --device cpu")
    return device if device != "auto" else "cuda" if gpus else "cpu"


def place(device: str, workers: int, gpus: int) -> list[str]:
    """The device of each worker: GPUs in turn, or the CPU for all."""
    return [f"cuda:{index % gpus}" if device == "cuda" else "cpu" for index in range(workers)]


def threads_each(workers: int, cpus: int) -> int:
    """Threads that each of `workers` may compute with when `cpus` are shared equally, at least one."""
    return max(1, cpus // max(1, workers))


def _of(cls: type[RouterSettings | WorkerSettings | UpSettings], flags: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in flags.items() if name in cls.model_fields}


def _handed(cls: type[RouterSettings | WorkerSettings], flags: Mapping[str, object]) -> dict[str, object]:
    """The flags that go to a service. A lossy form of pages is not for workers that prefill alone."""
    handed = {name: value for name, value in _of(cls, flags).items() if name not in CHOSEN}
    if cls is PrefillSettings and handed.get("kv_cache", "plain") not in EXACT_FORMS:
        del handed["kv_cache"]
    return handed


def _reserve(held: ExitStack, host: str, port: int, flag: str = "--port") -> int:
    """A free port of `host`: `port`, or any where it is 0. It stays bound until `held` closes.

    flag: with which another one can be named.
    """
    if port:
        _bind(held, host, port, flag, reuse=True)
        return port
    for candidate in random.SystemRandom().sample(WORKER_PORTS, 100):
        with suppress(ConfigError):
            return _bind(held, host, candidate)
    return _bind(held, host, WORKER_PORTS[0])


def _bind(held: ExitStack, host: str, port: int, flag: str = "--port", *, reuse: bool = False) -> int:
    """Hold a port, on which a process of the cluster can listen all the same; returns it.

    `reuse`: also one that a server has just left; but then two of these could hold the same one.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        probe = held.enter_context(socket.socket(family, kind, proto))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        probe.bind(address)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on: who sets it too can listen there
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{flag}: cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}; "
            f"end what listens there, or name another port with {flag}"
        ) from None
    return port


def _memory(worker: _Worker, sharing: int, gpus: list[str]) -> dict[str, object]:
    """Pages of a worker that shares its GPU: on its own, it would take most of what is free."""
    if worker.device == "cpu" or sharing == 1 or "kv_memory_gib" in worker.settings.model_fields_set:
        return {}
    gpu = gpus[int(worker.device.removeprefix("cuda:"))]
    return {"kv_memory_gib": shared_kv_memory_gib(gpu, sharing, worker.settings.model)}


def _router_process(
    router: RouterSettings, flags: Mapping[str, object], port: int, workers: list[_Worker], config: Path | None
) -> Process:
    addresses = {
        field: tuple(f"{LOOPBACK}:{worker.port}" for worker in workers if worker.role == role)
        for role, field in (("prefill", "prefill_workers"), ("decode", "decode_workers"), ("worker", "workers"))
        if role != "worker" or any(worker.role == role for worker in workers)
    }
    shown = {name: value for name, value in flags.items() if name != "api_keys"}  # any user may list processes
    keys = {"KVRAIL_ROUTER_API_KEYS": ",".join(router.api_keys)} if "api_keys" in flags else {}
    scheme = "https" if router.tls_http_cert else "http"
    reachable = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(router.host, router.host)
    return Process(
        "router",
        _command("router", {**shown, "port": port, **addresses}, config),
        f"{scheme}://{f'[{reachable}]' if ':' in reachable else reachable}:{port}",
        keys,
    )


def _worker_process(
    worker: _Worker, flags: Mapping[str, object], config: Path | None, workers: int, memory: Mapping[str, object]
) -> Process:
    values = {
        **_handed(type(worker.settings), flags),
        **memory,
        "host": LOOPBACK,
        "port": worker.port,
        "metrics_port": worker.metrics_port,
        "device": worker.device,
    }
    threads = threads_each(workers, usable_cores())
    chosen = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return Process(
        f"{worker.role}-{worker.index}",
        _command(worker.role, values, config),
        f"{'https' if worker.settings.metrics_tls else 'http'}://{LOOPBACK}:{worker.metrics_port}",
        {name: value for name, value in chosen.items() if name not in os.environ},
    )


def _command(role: str, values: Mapping[str, object], config: Path | None) -> tuple[str, ...]:
    """`kvrail ROLE` with `values`. The working folder is not on its path (-P): it may hold a `services` of its own."""
    from_file = (f"--config={config}",) if config else ()
    return (sys.executable, "-u", "-P", "-m", "kvrail", role, *flag_arguments(values), *from_file)
