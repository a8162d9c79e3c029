"""A router, a prefill and a decode worker as processes whose logs no disk takes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

from tests.chaos.cluster import ROOT
from tests.e2e.test_worker_end import free_port
from tests.models import kv_gib

START_S = 240


class Processes:
    """Started at once; `wait` until they serve."""

    def __init__(self, model: Path, environment: Mapping[str, str]) -> None:
        """`environment`: of every process, beside the tests' own."""
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._model = model
        self._processes: list[subprocess.Popen[bytes]] = []
        prefill, decode, http = (free_port() for _ in range(3))
        pages = ["--kv-dtype", "bfloat16", "--kv-memory-gib", str(kv_gib(model, 96)), "--transport", "tcp"]
        self._start("prefill", prefill, *pages)
        self._start("decode", decode, *pages, "--local-prefill-tokens", "16")
        targets = ["--prefill-workers", f"127.0.0.1:{prefill}", "--decode-workers", f"127.0.0.1:{decode}"]
        self._start("router", http, *targets)
        self.url = f"http://127.0.0.1:{http}"

    def _start(self, role: str, port: int, *flags: str) -> None:
        command = [sys.executable, "-m", "kvrail", role, "--port", str(port), *flags]
        command += ["--model", str(self._model), "--served-model-name", "tiny"]
        with open("/dev/full", "wb") as full:  # every write of it fails: the disk is full
            self._processes.append(subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=full, stderr=full))

    def states(self) -> list[str]:
        """Of both workers, as the router sees them; empty where it does not answer."""
        try:
            said = httpx.get(f"{self.url}/health", timeout=5).json()
        except httpx.HTTPError:
            return []
        return [worker["state"] for kind in ("prefill_workers", "decode_workers") for worker in said[kind].values()]

    def wait(self) -> None:
        """Until both workers are healthy. Raises RuntimeError where a process ends, or too much time passes."""
        deadline = time.monotonic() + START_S
        while self.states() != ["healthy"] * 2:
            ended = [process.args for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"the processes did not start: {ended or self.states()}")
            time.sleep(0.1)

    def memory(self) -> dict[str, int]:
        """MiB that each process has."""
        names = ("prefill", "decode", "router")
        resident = (psutil.Process(process.pid).memory_info().rss >> 20 for process in self._processes)
        return dict(zip(names, resident, strict=True))

    def end(self) -> list[int]:
        """Ask all to end; returns their exit statuses."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        return [process.wait(60) for process in self._processes]

    def kill(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
