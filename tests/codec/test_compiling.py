"""The process that compiles ahead: what it tells, that it ends with its parent, what asking for a codec waits for."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvrail.codec import compiling, registry
from kvrail.codec.base import BlockSpec
from kvrail.codec.compiling import CompilerProcess, Order, sample_pages, use_once
from kvrail.codec.core import cpu_compile
from kvrail.config.settings import PrefillSettings
from kvrail.telemetry.worker import CodecMetrics
from kvrail.values.layout import KVLayout
from kvrail.worker.codecs import Codecs

SPEC = BlockSpec("bfloat16", 1, 1, 16, 2, 8, 8, False)
LOADED = SimpleNamespace(layout=KVLayout(2, 2, 8, 8, 16, "bfloat16"), device=torch.device("cpu"))
PARENT = """
import sys, time
from kvrail.codec.base import BlockSpec
from kvrail.codec import compiling
from kvrail.codec.compiling import CompilerProcess, Order
compiling.NICENESS = 0
process = CompilerProcess(Order(BlockSpec("bfloat16", 1, 1, 16, 2, 8, 8, False), "cpu", "", ("raw", "lynx-exact")))
print(process.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def not_nice(monkeypatch):
    """On a busy machine the tests would wait long."""
    monkeypatch.setattr(compiling, "NICENESS", 0)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("name", registry.names())
def test_using_a_codec_once_is_what_a_transfer_does(name):
    if registry.get(name).exact and "cpu" not in registry.info(name).compiles_on:
        pages = sample_pages(SPEC, torch.device("cpu"))
        before = pages.pools.keys.clone()
        use_once(registry.get(name), pages)
        assert torch.equal(pages.pools.keys, before)


def test_what_is_done_is_told_and_what_fails_too():
    process = CompilerProcess(Order(SPEC, "cpu", "", ("raw", "no-such", "int8")))
    try:
        raw, missing, int8 = (process.outcome(name).result(250) for name in ("raw", "no-such", "int8"))
        assert missing is None
        assert raw.stages == (1.0,) and 0 < int8.stages[0] < 1
        assert all(seconds > 0 for cost in (raw, int8) for seconds in (cost.encode_s, cost.decode_s))
    finally:
        process.close()
    assert not alive(process.pid)


def test_a_codebook_that_is_gone_fails_all_and_raises_nothing():
    process = CompilerProcess(Order(SPEC, "cpu", "/nowhere/book.json", ("raw",)))
    assert process.outcome("raw").result(250) is None


def test_a_process_that_cannot_start_fails_all(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    process = CompilerProcess(Order(SPEC, "cpu", "", ("raw",)))
    assert process.outcome("raw").result(250) is None and process.pid == 0
    process.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_parent_is_killed(end):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(end)
    parent.wait()
    give_up = time.monotonic() + 120
    while alive(child):
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.fixture
def codecs(monkeypatch):
    """A worker's codecs, each of which counts as compiled, and those that were used in this process."""
    used = []
    compiled = {name: replace(registry.info(name), compiles_on=registry.DEVICES) for name in registry.names()}
    monkeypatch.setattr(registry, "_codecs", compiled)
    monkeypatch.setattr("kvrail.worker.codecs.use_once", lambda codec, pages: used.append(codec.name))
    made = Codecs(PrefillSettings(model="unread", kv_dtype="bfloat16"), allow_lossy=True)
    for chosen in ("names", "automatic"):
        monkeypatch.setattr(Codecs, chosen, property(lambda self: ("raw", "int8", "int4")))
    yield made, used
    made.close()


@pytest.fixture
def niceness(monkeypatch):
    """Of each process that was started to compile, in order."""
    started, start = [], compiling._start
    monkeypatch.setattr(compiling, "_start", lambda nice: started.append(nice) or start(0))
    monkeypatch.setattr(compiling, "NICENESS", 10)
    return started


def prepare(made):
    """Returns what the gauge says of a codec."""
    metrics = CollectorRegistry()
    made.prepare("raw", LOADED, CodecMetrics(metrics, "m"))
    assert metrics.get_sample_value("kvrail_codec_compile_seconds", {"model_name": "m", "codec": "raw"}) > 0
    return lambda name: metrics.get_sample_value("kvrail_codec_compiling", {"model_name": "m", "codec": name})


async def until(condition):
    async with asyncio.timeout(250):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_was_compiled_ahead_is_only_loaded_once_it_is_asked_for(codecs, niceness):
    made, used = codecs
    prepare(made)
    for name in ("int8", "int4"):
        assert (await made.measured(name, LOADED)).stages
    assert used == ["raw"] and made.usable("raw") and not made.usable("int8")
    assert made.ask_for("int8") == "is being compiled"
    while made.ask_for("int8"):
        await asyncio.sleep(0.01)
    assert used == ["raw", "int8"] and niceness == [10]
    assert made.ask_for("int8") == "" and not made.usable("int4")


async def test_what_is_asked_for_is_compiled_at_once_whatever_is_compiled_ahead(codecs, niceness, caplog):
    made, used = codecs
    gauge = prepare(made)
    os.kill(made._ahead.pid, signal.SIGSTOP)
    with caplog.at_level("INFO", "kvrail.codecs"):
        assert made.ask_for("int4") == "is being compiled"
        await until(lambda: gauge("int4") == 1)
        assert made.ask_for("int8") == "is being compiled"
        await until(lambda: made.usable("int8") and made.usable("int4"))
    assert sorted(used) == ["int4", "int8", "raw"] and niceness == [10, 0, 0]
    await until(lambda: gauge("int4") == gauge("int8") == 0)
    told = [record.getMessage() for record in caplog.records]
    for name in ("int4", "int8"):
        assert f"codec {name} was asked for and is compiled now; meanwhile others are used in its place" in told
        assert any(re.fullmatch(rf"codec {name} is compiled and in use after [0-9.]+ s", each) for each in told)


async def test_what_auto_leaves_out_is_compiled_only_when_it_is_asked_for(codecs, niceness, monkeypatch):
    made, used = codecs
    monkeypatch.setattr(Codecs, "automatic", property(lambda self: ("raw", "int8")))
    prepare(made)
    assert made._ahead.knows("int8") and not made._ahead.knows("int4") and not made.usable("int4")
    made.ask_for("int4")
    await until(lambda: made.usable("int4"))
    assert used == ["raw", "int4"] and niceness == [10, 0]


async def test_where_no_process_can_compile_a_thread_does(codecs, monkeypatch):
    made, used = codecs
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    prepare(made)
    made.ask_for("int4")
    await until(lambda: made.usable("int4"))
    assert used == ["raw", "int4"]


async def test_a_codec_that_cannot_be_compiled_is_never_usable_and_that_is_told(codecs, monkeypatch, caplog):
    made, _ = codecs
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    gauge = prepare(made)

    def fail(codec, pages):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("kvrail.worker.codecs.use_once", fail)
    made.ask_for("int8")
    await until(lambda: made.ask_for("int8") == "could not be compiled")
    assert not made.usable("int8")
    assert "codec int8 could not be compiled; others are used in its place until a restart" in caplog.text
    await until(lambda: gauge("int8") == 0)


async def test_what_ends_compiles_no_more(codecs):
    made, used = codecs
    prepare(made)
    os.kill(made._ahead.pid, signal.SIGSTOP)
    with made._compiling:
        made.ask_for("int8")
        made.close()
    await until(lambda: not made._compiling.locked())
    assert used == ["raw"] and not alive(made._ahead.pid)


def test_until_it_is_prepared_every_codec_is_usable(codecs):
    made, used = codecs
    assert made.usable("int8") and made.ask_for("int8") == "" and used == []


def test_where_nothing_can_be_kept_it_is_said_once(monkeypatch, caplog):
    def refuses(*signature, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function

    monkeypatch.setattr(cpu_compile, "njit", refuses)
    cpu_compile._tell_once.cache_clear()
    with caplog.at_level("WARNING", "kvrail.codecs"):
        for _ in range(2):
            assert cpu_compile.compiled(None)(len) is len
    cpu_compile._tell_once.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "kernels are compiled at every start (cannot cache function); name a folder in NUMBA_CACHE_DIR to keep them"
    ]
