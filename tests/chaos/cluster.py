"""Four workers and a router, each a process that can be killed, stopped and cut off.

Two workers prefill and two decode, or all four do both.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.ground import HUB_HOST, Ground
from tests.models import kv_gib

ROOT = Path(__file__).parents[2]
PORT = 7000
"""Of every worker: each has a host of its own."""
HTTP_PORT = 8000
PREFILL, DECODE = (0, 1), (2, 3)
"""Workers by number."""
START_S = 240
PAGES = 96


class Cluster:
    """Run inside the hub's namespace. decodes: the workers that decode."""

    def __init__(self, ground: Ground, folder: Path, models: Sequence[Path], transport: str, both: bool) -> None:
        """`models`: what all serve, and one of the same shape with other weights. transport: of the KV.

        both: all workers prefill and decode.
        """
        self.ground = ground
        self.url = f"http://{HUB_HOST}:{HTTP_PORT}"
        self._folder = folder
        self._models = models
        self._transport = transport
        self._both = both
        self.decodes = (*PREFILL, *DECODE) if both else DECODE
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        for number in (*PREFILL, *DECODE):
            self.start(number)
        named = {"--workers": self.decodes} if both else {"--decode-workers": DECODE, "--prefill-workers": PREFILL}
        flags = [part for flag, numbers in named.items() for part in (flag, ",".join(map(self.target, numbers)))]
        self._router = self._launch("router", "router", HUB_HOST, HTTP_PORT, [], self._models[0], *flags)

    def target(self, number: int) -> str:
        """The worker's address, as the router names it."""
        return f"{self.ground.host(number)}:{PORT}"

    def start(self, number: int, other_weights: bool = False) -> None:
        """Start a worker at the address that it always has."""
        role = "worker" if self._both else "prefill" if number in PREFILL else "decode"
        memory = str(kv_gib(self._models[0], PAGES))
        flags = ["--kv-dtype", "bfloat16", "--kv-memory-gib", memory, "--transport", self._transport]
        if role != "prefill":
            flags += ["--local-prefill-tokens", "16"]
        inside = self.ground.inside(self.ground.workers[number])
        name, host = f"{role}-{number}", self.ground.host(number)
        self._workers[number] = self._launch(name, role, host, PORT, inside, self._models[other_weights], *flags)

    def _launch(
        self, name: str, role: str, host: str, port: int, inside: list[str], model: Path, *flags: str
    ) -> subprocess.Popen[bytes]:
        command = [*inside, sys.executable, "-m", "kvrail", role, "--host", host, "--port", str(port)]
        command += ["--model", str(model), "--served-model-name", "tiny", *flags]
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a worker and to all that it started."""
        own = psutil.Process(self._workers[number].pid)
        for process in (own, *own.children(recursive=True)):
            os.kill(process.pid, what)

    def kill(self, number: int) -> None:
        """End a worker without a warning."""
        self.signal(number, signal.SIGKILL)
        self._workers[number].wait()

    def terminate(self, number: int) -> None:
        """Ask a worker to finish what it has, and wait for its end. Raises RuntimeError where it ends badly."""
        self._workers[number].send_signal(signal.SIGTERM)
        if code := self._workers[number].wait(120):
            raise RuntimeError(f"worker {number} ended with status {code}")

    def health(self) -> dict[str, dict[str, Any]]:
        """Each worker's entry in the router's /health, by target; empty where the router does not answer."""
        try:
            said = httpx.get(f"{self.url}/health", timeout=5).json()
        except httpx.HTTPError:
            return {}
        return said["decode_workers"] | said["prefill_workers"] | said["workers"]

    def healthy(self) -> set[int]:
        """Workers that take requests."""
        said = self.health()
        return {n for n in self._workers if said.get(self.target(n), {}).get("state") == "healthy"}

    def holdings(self) -> dict[str, tuple[int, int]]:
        """Open files and MiB of memory of the router and of each worker, by name and number of the process."""
        processes = {"router": self._router, **{f"worker {number}": each for number, each in self._workers.items()}}
        found = {}
        for name, each in processes.items():
            process = psutil.Process(each.pid)
            found[f"{name}, process {each.pid}"] = process.num_fds(), process.memory_info().rss >> 20
        return found

    def settled(self, patience_s: float = START_S) -> None:
        """Wait until every worker is healthy and holds nothing. Raises RuntimeError where that does not come."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            said = self.health()
            if len(said) == len(self._workers) and all(map(_idle, said.values())):
                return
            time.sleep(0.2)
        raise RuntimeError(f"the cluster did not come to rest: {self.health()}")

    def stop(self) -> None:
        """End every process."""
        for number, process in self._workers.items():
            if process.poll() is None:
                self.kill(number)
        self._router.terminate()
        self._router.wait(30)


def _idle(entry: dict[str, Any]) -> bool:
    """Whether a worker takes requests, runs none, and has every page back."""
    if entry["state"] != "healthy" or entry["running"] or entry["waiting"]:
        return False
    return entry["pages_free"] + entry["pages_cached"] == entry["pages_total"]
