"""Workers killed outright while they work: the client's stream goes on as if nothing had happened."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.models import tiny_model

ROOT = Path(__file__).parents[2]
PROMPT = "the quick brown fox jumps over the lazy dog " * 12
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 250, "temperature": 0.7, "seed": 3, "ignore_eos": True}


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Cluster:
    """One router, two prefill and two decode workers, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.processes: dict[str, subprocess.Popen] = {}
        self.folder = folder
        http, *ports = free_ports(5)
        self.url = f"http://127.0.0.1:{http}"
        self.prefills, self.decodes = [f"127.0.0.1:{p}" for p in ports[:2]], [f"127.0.0.1:{p}" for p in ports[2:]]
        for address in self.prefills:
            self.start("prefill", address, "--kv-dtype", "float32", "--num-pages", "64", "--no-prefix-cache")
        for address in self.decodes:
            self.start("decode", address, "--kv-dtype", "float32", "--num-pages", "64", "--no-prefix-cache")
        workers = ["--decode-workers", ",".join(self.decodes), "--prefill-workers", ",".join(self.prefills)]
        self.start("router", f"127.0.0.1:{http}", *workers)
        deadline = time.monotonic() + 120
        while any(state != "healthy" for state in self.states().values()):
            assert time.monotonic() < deadline, "not healthy"
            time.sleep(0.2)

    def start(self, role, address, *flags):
        host, _, port = address.rpartition(":")
        shared = ["--model", str(tiny_model("llama")), "--served-model-name", "tiny"]
        command = [sys.executable, "-m", "services.cli.main", role, "--host", host, "--port", port, *shared, *flags]
        with (self.folder / f"{role}-{port}").open("wb") as log:
            self.processes[address] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def states(self):
        try:
            health = httpx.get(f"{self.url}/health").json()
        except httpx.HTTPError:
            return {"router": "down"}
        workers = health["decode_workers"] | health["prefill_workers"]
        return {address: worker["state"] for address, worker in workers.items()}

    def busy_decode(self):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            workers = httpx.get(f"{self.url}/health").json()["decode_workers"]
            found = [address for address, worker in workers.items() if worker.get("running")]
            if found:
                return found[0]
        pytest.fail("no decode worker says that it runs anything")

    def kill(self, address):
        self.processes[address].send_signal(signal.SIGKILL)
        self.processes[address].wait()

    def prefilled_by(self):
        answer = httpx.post(f"{self.url}/v1/completions", json={**BODY, "max_tokens": 2}, timeout=60).json()
        return answer["usage"]["kvrail"]["prefill_worker"]

    def stream(self, after=0, then=None):
        """The text of one answer; `then` is called once, after so many chunks."""
        text, chunks = "", 0
        body = {**BODY, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return text
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                chunks += 1
                if chunks == after and then is not None:
                    then()
        pytest.fail("the stream ended without [DONE]")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    started = Cluster(tmp_path_factory.mktemp("lost"))
    yield started
    for process in started.processes.values():
        process.kill()
        process.wait()


def test_a_killed_decode_worker_is_not_noticed(cluster):
    whole = cluster.stream()
    assert cluster.stream(after=40, then=lambda: cluster.kill(cluster.busy_decode())) == whole
    assert cluster.stream() == whole
    assert sorted(cluster.states()[address] for address in cluster.decodes) == ["down", "healthy"]


def test_killed_prefill_workers_are_not_noticed(cluster):
    """One decode worker is left by the test before."""
    whole = cluster.stream()
    assert cluster.prefilled_by() in cluster.prefills
    cluster.kill(cluster.prefilled_by())
    assert cluster.stream() == whole
    cluster.kill(cluster.prefilled_by())
    assert cluster.stream() == whole
    assert cluster.prefilled_by() is None
