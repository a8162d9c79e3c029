"""A cluster of real processes on this machine, of which any can be killed."""

import json
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.forked import Forked

ROOT = Path(__file__).parents[2]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Processes:
    """A router, prefill and decode workers of one model, each a process of its own; they can be killed."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *flags: str,
        prefills: int = 2,
        decodes: int = 2,
        both: bool = False,
        router: tuple[str, ...] = (),
    ) -> None:
        """flags: of every worker. both: each could do both, and the router knows it by one. router: its flags."""
        self.processes: dict[str, Forked] = {}
        self.folder, self.model = folder, model
        http, *ports = free_ports(1 + prefills + decodes)
        self.url = f"http://127.0.0.1:{http}"
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.prefills, self.decodes = addresses[:prefills], addresses[prefills:]
        for address in self.prefills:
            self.start("worker" if both else "prefill", address, *flags)
        for address in self.decodes:
            self.start("worker" if both else "decode", address, *flags)
        workers = ["--decode-workers", ",".join(self.decodes), "--prefill-workers", ",".join(self.prefills)]
        self.start("router", f"127.0.0.1:{http}", *workers, *router)
        deadline = time.monotonic() + 180
        while any(state != "healthy" for state in self.states().values()):
            assert time.monotonic() < deadline, "not healthy"
            time.sleep(0.2)

    def start(self, role, address, *flags):
        host, _, port = address.rpartition(":")
        shared = ["--model", str(self.model), "--served-model-name", "tiny"]
        arguments = [role, "--host", host, "--port", port, *shared, *flags]
        self.processes[address] = Forked(arguments, self.folder / f"{role}-{port}")

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

    def signal(self, address, what):
        self.processes[address].send_signal(what)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def ask(self, body):
        """The answer to a completions request."""
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, body, after=0, then=None):
        """The text of one answer; `then` is called once, after so many chunks."""
        text, chunks = "", 0
        with httpx.stream("POST", f"{self.url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
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
