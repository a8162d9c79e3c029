"""A worker whose model comes slowly: its metrics port says so, and no alert takes it for dead."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import yaml

from tests.e2e.processes import ROOT, free_ports
from tests.models import tiny_model

RULES = ROOT / "deploy" / "prometheus" / "rules"
COMMIT = "0" * 40
SLOW_S = 8
"""How long the weights take to come: longer than the alerts wait here."""


class Hub(BaseHTTPRequestHandler):
    """Serves one model as the Hugging Face Hub does, its weights in SLOW_S seconds."""

    protocol_version = "HTTP/1.1"
    folder: ClassVar[Path]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.path.startswith("/api/models/"):
            files = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": COMMIT}
                for path in self.folder.iterdir()
            ]
            model = {"id": "some/model", "sha": COMMIT, "siblings": [{"rfilename": each["path"]} for each in files]}
            self.answer(json.dumps(files if "/tree/" in self.path else model).encode())
        elif (path := self.folder / self.path.rpartition("/")[2].partition("?")[0]).is_file():
            self.answer(path.read_bytes(), slowly=path.suffix == ".safetensors")
        else:
            self.answer(b"", status=404)

    def answer(self, body, slowly=False, status=200):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "ETag": f'"{len(body)}"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        parts = 40 if slowly else 1
        size = -(-len(body) // parts)
        for at in range(0, len(body), size or 1):
            self.wfile.write(body[at : at + size])
            time.sleep(SLOW_S / parts if slowly else 0)

    def log_message(self, *arguments):
        """Be quiet."""


@contextlib.contextmanager
def hub(folder):
    Hub.folder = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def ended(command, log, **options):
    """A process that ends with the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def test_a_worker_whose_model_comes_slowly_is_loading_and_not_dead(tmp_path):
    port, metrics_port = free_ports(2)
    with hub(tiny_model("llama")) as url:
        command = [sys.executable, "-m", "kvrail", "decode", "--model", "some/model", "--kv-memory-gib", "0.01"]
        ports = ["--host", "127.0.0.1", "--port", str(port), "--metrics-port", str(metrics_port)]
        surroundings = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        begun = time.monotonic()
        environment = os.environ | surroundings
        with (
            ended([*command, *ports], tmp_path / "worker.log", cwd=ROOT, env=environment),
            watched(tmp_path, metrics_port),
        ):
            said = follow(f"http://127.0.0.1:{metrics_port}", begun, tmp_path / "worker.log")
    assert said[0].startswith("loading: import") and any(each.startswith("loading: load") for each in said)
    assert time.monotonic() - begun > SLOW_S


def follow(url, begun, log):
    """What /health says until the worker serves; it answers all the time, and so does /metrics."""
    said = []
    while (now := time.monotonic() - begun) < 240:
        try:
            metrics, health = (httpx.get(f"{url}/{path}", timeout=5) for path in ("metrics", "health"))
        except httpx.ConnectError:
            assert not said and now < 60, log.read_text()
            time.sleep(0.05)
            continue
        (state,) = re.findall(r'kvrail_process_state{.*state="(\w+)"} 1.0', metrics.text)
        if health.status_code == 200:
            return said
        assert health.status_code == 503 and state == "loading", health.text  # of the state before, or the same
        said.append(health.text)
        time.sleep(0.2)
    pytest.fail(log.read_text())


@contextlib.contextmanager
def watched(folder, port):
    """Prometheus with the cluster's alerts, in seconds where they wait for minutes; none fires in the block."""
    program = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    if program is None:
        yield
        return
    rules = (RULES / "alerts.yml").read_text()
    (folder / "alerts.yml").write_text(re.sub(r"for: 2m", "for: 2s", rules))
    (folder / "recording.yml").write_text((RULES / "recording.yml").read_text())
    every = {"scrape_interval": "500ms", "scrape_timeout": "400ms", "evaluation_interval": "500ms"}
    target = {"job_name": "kvrail", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    config = {"global": every, "rule_files": ["*.yml"], "scrape_configs": [target]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (own,) = free_ports(1)
    flags = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with ended([program, *flags, f"--web.listen-address=127.0.0.1:{own}"], folder / "prometheus.log"):
        yield
        answer = httpx.get(f"http://127.0.0.1:{own}/api/v1/query", params={"query": "count_over_time(up[1m])"}).json()
        assert float(answer["data"]["result"][0]["value"][1]) > SLOW_S, "it has watched"
        fired = 'sum by (alertname) (count_over_time(ALERTS{alertstate="firing"}[5m]))'
        answer = httpx.get(f"http://127.0.0.1:{own}/api/v1/query", params={"query": fired}).json()
        assert answer["data"]["result"] == []
