"""The examples that a newcomer sees first run as they stand, but for the port, and their KV crosses by default."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from kvrail.config.settings import DecodeSettings
from tests.e2e.cluster import ROOT, samples, started

DEFAULT = str(DecodeSettings.model_fields["local_prefill_tokens"].default)
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started(tmp_path_factory, "--local-prefill-tokens", DEFAULT) as running:
        yield running


def crossed(cluster):
    """Bytes of KV that the decode worker has received so far."""
    counted = samples(cluster.metrics["decode-0"])
    return sum(value for name, _, value in counted if name == "kvrail_kv_payload_bytes_total")


def python_example(page, cluster):
    """What the first Python example of a page that asks a server prints."""
    code = next(each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "127.0.0.1:8000" in each)
    command = [sys.executable, "-c", code.replace("http://127.0.0.1:8000", cluster.url)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_the_readmes_python_example(cluster):
    before = crossed(cluster)
    kv_bytes = int(python_example(README, cluster).split()[-1])
    assert kv_bytes == crossed(cluster) - before > 0


def test_the_readmes_trace(cluster, tmp_path):
    (command,) = re.findall(r"`kvrail (trace < .*?)`", README)
    out = tmp_path / "trace.json"
    shell = f"{shlex.quote(sys.executable)} -m kvrail {command} --url {cluster.url} --out {shlex.quote(str(out))}"
    subprocess.run(["bash", "-c", shell], cwd=ROOT, check=True, timeout=120)
    assert json.loads(out.read_text())["otherData"]["kv_bytes"] > 0


def test_provisional_streamings_client(cluster):
    before = crossed(cluster)
    page = (ROOT / "docs" / "provisional-streaming.md").read_text(encoding="utf-8")
    assert python_example(page, cluster).strip()
    assert crossed(cluster) > before
