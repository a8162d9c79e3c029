"""What a worker's metrics port shows before the worker serves, and after."""

import asyncio

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from kvrail.config.settings import DecodeSettings
from kvrail.telemetry.series import Registry
from kvrail.telemetry.startup import Startup
from kvrail.telemetry.worker import MemoryMetrics
from kvrail.worker.monitor import Monitor


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kvrail.telemetry.startup.perf_counter", lambda: now[0])
    return now


def seconds(registry, phase):
    return registry.get_sample_value("kvrail_worker_start_seconds", {"model_name": "m", "phase": phase})


def test_phases_follow_each_other_and_the_present_one_grows(clock):
    registry = Registry()
    startup = Startup(registry, "m", "decode")
    clock[0] = 2.0
    startup.tick()
    assert (seconds(registry, "import"), seconds(registry, "load")) == (2, 0)
    for moment, phase in ((3.0, "load"), (10.0, "compile"), (11.0, "capture"), (15.0, "compile"), (17.0, "warm_up")):
        clock[0] = moment
        startup.enter(phase)
    clock[0] = 18.0
    startup.end()
    clock[0] = 99.0
    startup.tick()
    found = {phase: seconds(registry, phase) for phase in ("import", "load", "compile", "capture", "warm_up")}
    assert found == {"import": 3, "load": 7, "compile": 3, "capture": 4, "warm_up": 1}


class Served:
    now, measured = "serving", 0

    def state(self):
        return self.now

    def measure(self):
        self.measured += 1


def state(monitor):
    text, _ = asyncio.run(monitor.render("/metrics", "application/openmetrics-text"))
    families = {each.name: each for each in openmetrics.text_string_to_metric_families(text.decode())}
    (found,) = [each.labels["state"] for each in families["kvrail_process_state"].samples if each.value]
    assert "kvrail_build_info" in families and "kvrail_worker_start_seconds" in families
    return found


def test_a_monitor_tells_what_keeps_the_worker_from_serving(clock):
    monitor, worker = Monitor(DecodeSettings(model="m")), Served()
    clock[0] = 4.0
    assert state(monitor) == "loading" and monitor.obstacle() == "loading: import, 4 s so far"
    monitor.startup.enter("load")
    monitor.startup.loaded(3_000_000_000, 16_000_000_000)
    clock[0] = 9.0
    assert monitor.obstacle() == "loading: load, 5 s so far, 3.00 of 16.00 GB of weights"
    monitor.serves(worker)
    assert (state(monitor), monitor.obstacle(), worker.measured) == ("serving", "", 1)
    for worker.now in ("draining", "broken"):
        assert state(monitor) == worker.now and monitor.obstacle() == f"not serving: {worker.now}"


def test_uses_of_a_gpus_memory_add_up_to_it():
    registry = Registry()
    memory = MemoryMetrics(registry, "m", weights=16, kv_cache=40)
    for free, other in ((20, 4), (30, 0)):  # what was counted twice is nobody's
        memory.show(free=free, total=80)
        found = {each.labels["use"]: each.value for family in registry.collect() for each in family.samples}
        assert found == {"weights": 16, "kv_cache": 40, "free": free, "other": other}
