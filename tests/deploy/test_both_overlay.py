"""The compose overlay for workers of both roles: what its processes are given is what they take."""

from pathlib import Path

import pytest
import yaml

from kvrail.config.settings import BothSettings, RouterSettings

ROOT = Path(__file__).parents[2]
BASE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
OVERLAY = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.both.yaml").read_text())["services"]


@pytest.fixture
def environment(monkeypatch):
    """Sets what a service is given, variables of `.env` as it has them."""
    file = [line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if "=" in line and line[0] != "#"]

    def given(*services):
        for name, value in {name: value for each in services for name, value in each["environment"].items()}.items():
            for known, default in file:
                value = str(value).replace(f"${{{known}}}", default)
            monkeypatch.setenv(name, value)

    return given


def test_a_worker_takes_what_it_is_given(environment):
    worker = OVERLAY["worker"]
    assert (worker["command"], worker["extends"]) == (["worker"], {"file": "compose.yaml", "service": "prefill"})
    environment(BASE["prefill"], worker)
    settings = BothSettings.load()
    assert (settings.host, settings.metrics_port, settings.allowed_prefill_workers) == ("0.0.0.0", 9100, ("worker",))
    assert settings.tls_cert == "/certs/worker.pem"


def test_the_router_finds_these_workers_and_no_others(environment):
    environment(BASE["router"], OVERLAY["router"])
    settings = RouterSettings.load()
    port = BothSettings.model_fields["port"].default
    assert settings.workers == (f"dns+worker:{port}",)
    assert (settings.prefill_workers, settings.decode_workers) == ((), ())
    assert [OVERLAY[role]["scale"] for role in ("prefill", "decode")] == [0, 0]


def test_prometheus_scrapes_them():
    (job, _) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert "worker" in job["dns_sd_configs"][0]["names"]
