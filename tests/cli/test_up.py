"""`kvrail up` with the real services and a tiny random model."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.test_supervisor import alive, wait_until
from tests.e2e.cluster import pid_at
from tests.forked import Forked
from tests.models import tiny_model

ROOT = Path(__file__).parents[2]
START_S = 180.0


class Up:
    """A running `kvrail up`. real: no fork, and in a folder that has a `services` of its own."""

    def __init__(self, folder, *argv, real=False):
        self.log = folder / "log"
        flags = ("--port", "0", "--model", str(tiny_model("llama")), "--kv-memory-gib", "0.05", "--device", "cpu")
        arguments = ["up", *flags, *argv]
        self.process = started_among_others(folder, self.log, arguments) if real else Forked(arguments, self.log)
        deadline = time.monotonic() + START_S
        while "Ctrl-C stops the cluster" not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)
        self.url = re.search(r"kvrail chat --url (\S+)", self.text())[1]
        self.metrics = dict(re.findall(r"^  (router|prefill-\d|decode-\d) +(\S+/metrics)$", self.text(), re.MULTILINE))
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def text(self):
        return self.log.read_text()

    def whole(self):
        """Whether all workers take requests."""
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).json().get("status") == "ok"
        except httpx.TransportError:
            return False

    def child(self, role):
        return psutil.Process(pid_at(self.url if role == "router" else self.metrics[f"{role}-0"]))

    def all_gone(self):
        wait_until(lambda: not any(alive(child.pid) for child in self.children), "a process is left behind")


def started_among_others(folder, log, arguments):
    """A process that would import somebody else's code if the folder were on its path."""
    (folder / "services").mkdir()
    (folder / "services" / "__init__.py").write_text("raise RuntimeError('somebody else's code')\n")
    command = "import sys; from kvrail.cli.main import main; raise SystemExit(main())"
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", command, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture
def up(tmp_path):
    started = []

    def start(*argv, **options):
        started.append(Up(tmp_path, *argv, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        for child in each.children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def chat(url, *argv):
    command = [sys.executable, "-m", "kvrail", "chat", "--url", url, *argv]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def metric(url, name):
    """Sum of a metric's samples over all their labels."""
    lines = httpx.get(url, trust_env=False).text.splitlines()
    samples = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " "))]
    assert samples, name
    return sum(samples)


ASKED = ("--max-tokens", "12", "--temperature", "0", "a question")


def check_that_it_answers(cluster):
    """What it answers; KV crossed from worker to worker, and another model is refused."""
    assert sorted(cluster.metrics) == ["decode-0", "decode-1", "prefill-0", "router"]
    answers = [chat(cluster.url, *ASKED) for _ in range(2)]
    assert [answer.returncode for answer in answers] == [0, 0], answers
    assert answers[0].stdout == answers[1].stdout != "\n"
    assert metric(cluster.metrics["prefill-0"], "kvrail_kv_frames_total") > 0
    refused = chat(cluster.url, "--model", "another", "hi")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "another" in refused.stderr
    assert "Traceback" not in cluster.text()
    return answers[0].stdout


def test_a_cluster_answers_as_before_once_a_lost_process_is_started_anew_and_ctrl_c_ends_it(up):
    cluster = up("--local-prefill-tokens", "0", "--prefill-workers", "1", "--decode-workers", "2")
    before = check_that_it_answers(cluster)
    for role in ("decode", "prefill", "router"):
        cluster.child(role).kill()
        name = "router" if role == "router" else rf"{role}-\d"
        wait_until(lambda: re.search(rf"{name} ended by SIGKILL; restarting", cluster.text()), name)  # noqa: B023
        deadline = time.monotonic() + START_S
        while not cluster.whole() or (after := chat(cluster.url, *ASKED)).returncode:
            assert time.monotonic() < deadline, cluster.text()
            time.sleep(0.1)
        assert after.stdout == before
    cluster.children = psutil.Process(cluster.process.pid).children(recursive=True)
    told = len(cluster.text())
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(60) == 0, cluster.text()
    assert "killing" not in cluster.text()
    assert "Traceback" not in cluster.text()[told:]
    cluster.all_gone()


def test_a_lost_worker_ends_the_cluster_without_restarts(up):
    cluster = up("--restarts", "0")
    cluster.child("decode").kill()
    assert cluster.process.wait(60) == 1
    assert "kvrail up: decode-0 ended by SIGKILL; the others are stopped" in cluster.text()
    cluster.all_gone()


def test_nothing_outlives_a_kvrail_up_that_is_killed(up):
    cluster = up(real=True)
    assert len({cluster.child(role).pid for role in ("router", "prefill", "decode")}) == 3
    cluster.process.kill()
    cluster.all_gone()


def test_a_mistake_of_a_worker_is_told_with_its_last_lines(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    log = tmp_path / "log"
    assert Forked(["up", "--port", "0", "--model", tmp_path, "--device", "cpu"], log).wait(START_S) == 1
    assert re.search(r"^kvrail up: .*ended with status [12]", log.read_text(), re.MULTILINE)
    assert re.search(r"^  (router|prefill-0|decode-0): \S", log.read_text(), re.MULTILINE)
