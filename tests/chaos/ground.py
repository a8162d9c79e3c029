"""A network of namespaces: each worker in one of its own, all on the bridge of a hub, where router and client run."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HUB_HOST = "10.78.0.1"
BRIDGE = "hub0"
DEVICE = "worker0"
"""A worker's device in its namespace."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Names of the namespaces, which hold for as long as `laid` does."""

    hub: str
    workers: tuple[str, ...]

    def host(self, worker: int) -> str:
        return f"10.78.0.{10 + worker}"

    def inside(self, namespace: str) -> list[str]:
        """What a command starts with in order to run there."""
        return ["ip", "netns", "exec", namespace]

    def cut(self, worker: int) -> None:
        """Drop every packet from and to a worker, without a word to either side."""
        self._filter(worker, "blackhole")

    def mend(self, worker: int) -> None:
        self._filter(worker, "pfifo")

    def slow(self, worker: int, rate: str) -> None:
        """Hold a worker's link to `rate`, as tc has it."""
        self._filter(worker, "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")

    def _filter(self, worker: int, *discipline: str) -> None:
        _run("tc", "-n", self.hub, "qdisc", "replace", "dev", f"port{worker}", "root", *discipline)
        _run("tc", "-n", self.workers[worker], "qdisc", "replace", "dev", DEVICE, "root", *discipline)


@contextmanager
def laid(workers: int) -> Iterator[Ground]:
    """Namespaces for so many workers. Raises CalledProcessError where that is not permitted.

    Raises FileNotFoundError where iproute2 is not installed, or not in PATH.
    """
    _run("tc", "-V")
    ground = Ground(f"kvrail-hub-{os.getpid()}", tuple(f"kvrail-w{i}-{os.getpid()}" for i in range(workers)))
    try:
        _run("ip", "netns", "add", ground.hub)
        _ip(ground.hub, "link", "add", BRIDGE, "type", "bridge")
        _ip(ground.hub, "addr", "add", f"{HUB_HOST}/24", "dev", BRIDGE)
        for device in ("lo", BRIDGE):
            _ip(ground.hub, "link", "set", device, "up")
        for number, space in enumerate(ground.workers):
            _run("ip", "netns", "add", space)
            peer = ["peer", "name", DEVICE, "netns", space]
            _ip(ground.hub, "link", "add", f"port{number}", "type", "veth", *peer)
            _ip(ground.hub, "link", "set", f"port{number}", "master", BRIDGE, "up")
            _ip(space, "addr", "add", f"{ground.host(number)}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip(space, "link", "set", device, "up")
        yield ground
    finally:
        for space in (*ground.workers, ground.hub):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _ip(namespace: str, *arguments: str) -> None:
    _run("ip", "-n", namespace, *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
