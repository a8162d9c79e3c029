"""A newcomer's first minutes: README's "Try it" in a clean clone as it stands there, and packing; no long silence."""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from kvrail.cli.up import FIRST_CHAT
from tests.e2e.processes import free_ports

ROOT = Path(__file__).parents[2]
SILENCE_S = 5.0
START_S = 1200.0
OF_MAKE = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
"""What `make newcomer` leaves to what it starts; a newcomer's terminal has none of it."""

pytestmark = [pytest.mark.newcomer, pytest.mark.timeout(1800)]


def commands(readme):
    """The shell commands of README's section "Try it", in order."""
    section = re.search(r"^## Try it\n(.*?)^## ", readme, re.MULTILINE | re.DOTALL)[1]
    return [block.strip() for block in re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)]


class Terminal:
    """A command that runs, with what it has written and the longest time for which it has written nothing."""

    def __init__(self, command, folder, environment):
        self.process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env={name: each for name, each in os.environ.items() if name not in OF_MAKE} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.text = ""
        self.silences = []  # (seconds, what was written before)
        self._last = time.monotonic()

    def until(self, words, seconds):
        """Read until `words` are written."""
        deadline, output = time.monotonic() + seconds, self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while words not in self.text:
                assert time.monotonic() < deadline, self.text[-2000:]
                if selector.select(1.0):
                    written = os.read(output.fileno(), 1 << 16).decode(errors="replace")
                    assert written, f"it ended: {self.text[-2000:]}"
                    now = time.monotonic()
                    self.silences.append((now - self._last, self.text[-100:]))
                    self._last, self.text = now, self.text + written

    def end(self):
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.communicate(timeout=60)


@pytest.fixture
def clone(tmp_path):
    """The last commit, as somebody else gets it; KVRAIL_NEWCOMER_SOURCE names another repository."""
    source = os.environ.get("KVRAIL_NEWCOMER_SOURCE", str(ROOT))
    subprocess.run(["git", "clone", "--quiet", "--no-local", source, tmp_path / "kvrail"], check=True)
    return tmp_path / "kvrail"


def test_packing_and_unpacking_with_no_kernel_compiled_yet(tmp_path):
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    for command, source, out, words in (
        ("pack", "models/kvrail-demo", tmp_path / "packed", "packed 44,593,744 bytes"),
        ("unpack", tmp_path / "packed", tmp_path / "restored", "unpacked 44,593,744 bytes"),
    ):
        terminal = Terminal(f"exec {sys.executable} -m kvrail {command} {source} {out}", ROOT, environment)
        terminal.until(words, START_S)
        terminal.process.communicate(timeout=60)
        assert max(terminal.silences)[0] <= SILENCE_S, max(terminal.silences)
        assert "compiling kernel" in terminal.text


def test_readmes_first_commands_in_a_clean_clone(clone):
    port, metrics = free_ports(2)
    start, request, *_ = (
        command.replace(":8000", f":{port}") for command in commands((clone / "README.md").read_text())
    )
    assert start == "make up"
    # README's ports may be taken here; a virtual environment that is named would be another one's.
    terminal = Terminal(start, clone, {"ARGS": f"--port {port} --metrics-port {metrics}", "VENV": ".venv"})
    try:
        terminal.until("Ctrl-C stops the cluster.", START_S)
        assert max(terminal.silences)[0] <= SILENCE_S, max(terminal.silences)
        asked = subprocess.run(["bash", "-c", request], cwd=clone, capture_output=True, text=True, check=True)
        answer = json.loads(asked.stdout)
        assert [{"role": m["role"], "content": m["content"]} for m in FIRST_CHAT] == json.loads(
            re.search(r"-d '(.*)'", request, re.DOTALL)[1]
        )["messages"], "README asks something else than `kvrail up` proposes"
        assert "grep" in answer["choices"][0]["message"]["content"]
        told = answer["usage"]["kvrail"]
        assert 0 < told["kv_bytes"] < told["kv_raw_bytes"]  # what the wire saved
        urls = dict(re.findall(r"^  (prefill-0|decode-0) +(\S+/metrics)$", terminal.text, re.MULTILINE))
        assert urls["prefill-0"] == f"http://127.0.0.1:{metrics}/metrics"
        for url in urls.values():
            lines = httpx.get(url, trust_env=False).text.splitlines()
            crossed = [line for line in lines if line.startswith("kvrail_kv_payload_bytes_total{")]
            assert sum(float(line.rpartition(" ")[2]) for line in crossed) == told["kv_bytes"]
    finally:
        terminal.end()
    assert terminal.process.returncode in (0, -signal.SIGINT)  # the cluster ended in order; the shell has Ctrl-C too
