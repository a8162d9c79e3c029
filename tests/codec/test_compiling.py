"""The process that compiles ahead: what it tells, that it ends with its parent, what asking for a codec waits for."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from kvrail.codec import compiling, registry
from kvrail.codec.base import BlockSpec
from kvrail.codec.compiling import CompilerProcess, Order, sample_pages, use_once
from kvrail.codec.core import cpu_compile
from kvrail.config import PrefillSettings
from kvrail.layout import KVLayout
from kvrail.services.codecs import CodecChoiceError, Codecs

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
    if registry.get(name).exact and not registry.compiles(name, "cpu"):
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
    process.hurry("raw")


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
    monkeypatch.setattr(registry, "compiles", lambda name, kind: True)
    monkeypatch.setattr("kvrail.services.codecs.use_once", lambda codec, pages: used.append(codec.name))
    made = Codecs(PrefillSettings(model="unread", kv_dtype="bfloat16"), allow_lossy=True)
    monkeypatch.setattr(Codecs, "names", property(lambda self: ("raw", "int8", "int4")))
    yield made, used
    made.close()


async def test_nothing_is_used_here_until_it_is_asked_for_and_then_once(codecs):
    made, used = codecs
    made.warm_up("raw", LOADED)
    made.warm_up_others(["raw"], LOADED)
    for name in ("int8", "int4"):
        assert (await asyncio.wrap_future(made._compiler.outcome(name))).stages
    assert used == ["raw"]
    assert (await made.ready("raw")).name == "raw"
    found = await asyncio.gather(*(made.ready("int8") for _ in range(5)))
    assert {codec.name for codec in found} == {"int8"} and used == ["raw", "int8"]
    with pytest.raises(CodecChoiceError):
        await made.ready("lynx")


async def test_asking_waits_for_the_process_and_a_cancelled_one_leaves_the_others(codecs, monkeypatch):
    made, used = codecs
    started = []
    monkeypatch.setattr(compiling.CompilerProcess, "hurry", lambda self, name: started.append(name))
    made.warm_up_others(["raw"], LOADED)
    os.kill(made._compiler.pid, signal.SIGSTOP)
    first, second = (asyncio.create_task(made.ready("int4")) for _ in range(2))
    while not started:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled() and not second.done() and used == []
    os.kill(made._compiler.pid, signal.SIGCONT)
    assert (await second).name == "int4" and used == ["int4"] and started == ["int4"]


async def test_where_the_process_dies_it_is_used_all_the_same(codecs):
    made, used = codecs
    made.warm_up_others(["raw"], LOADED)
    waiting = asyncio.create_task(made.ready("int4"))
    await asyncio.sleep(0)
    os.kill(made._compiler.pid, signal.SIGKILL)
    assert (await waiting).name == "int4" and used == ["int4"]


async def test_a_first_use_that_fails_is_left_to_the_request(codecs, monkeypatch):
    made, _ = codecs

    def fail(codec, pages):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("kvrail.services.codecs.use_once", fail)
    made.warm_up_others(["raw"], LOADED)
    made.close()
    assert (await made.ready("int8")).name == "int8"


async def test_without_a_warm_up_it_is_there_at_once(codecs):
    made, used = codecs
    assert (await made.ready("int8")).name == "int8" and used == []


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
