"""`kvrail up` with the model that ships: a whole cluster of real processes."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.forked import Forked

ROOT = Path(__file__).parents[2]
MODEL = "kvrail-demo"


class Cluster:
    def __init__(self, log: Path, *flags: str) -> None:
        flags = ("--port", "0", "--kv-memory-gib", "0.125", "--local-prefill-tokens", "16", *flags)
        self.process = Forked(["up", *flags], log)
        deadline = time.monotonic() + 180
        while "Ctrl-C stops the cluster" not in log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        text = log.read_text()
        self.url = re.search(r"kvrail chat --url (\S+)", text)[1]
        self.metrics = dict(re.findall(r"^  (router|prefill-\d|decode-\d) +(\S+/metrics)$", text, re.MULTILINE))
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@contextmanager
def started(tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[Cluster]:
    """A cluster for a module's tests; it must end well."""
    cluster = Cluster(tmp_path_factory.mktemp("e2e") / "log", *flags)
    yield cluster
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(60) == 0


def samples(url: str):
    """Every sample of a metrics page: name, labels, value."""
    return [sample[:3] for f in text_string_to_metric_families(httpx.get(url).text) for sample in f.samples]


def pid_at(url: str) -> int:
    """Of the process that listens there."""
    port = urlsplit(url).port
    listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    return next(each.pid for each in listening if each.laddr.port == port)


def lint(text: str) -> None:
    """Give `text` to promtool; where there is none the test is skipped, but fails in CI."""
    promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        assert not os.environ.get("CI"), "promtool is not installed; set PROMTOOL to where it is"
        pytest.skip("promtool is not installed")
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
