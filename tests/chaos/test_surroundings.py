"""What surrounds the processes goes wrong: the wall clock jumps, disks are full. No answer shows it."""

import asyncio
import contextlib
import subprocess
import sys
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.load import ask, bodies
from tests.chaos.surroundings import Processes
from tests.clocks import HOUR, WallClock
from tests.models import tiny_model

JUMPS = (6 * HOUR, -6 * HOUR, 400 * 24 * HOUR, -400 * 24 * HOUR, 10, -10, 0)
CODECS = ("raw", "splitzip")
"""On a full disk the kernels of the second are compiled anew by each process that needs them."""
SPELL_S = 4.0
"""For which requests go on around each jump; a process sees it a second later at most."""


@contextlib.contextmanager
def started(environment):
    processes = Processes(tiny_model("llama"), environment)
    try:
        processes.wait()
        yield processes
        assert processes.end() == [0, 0, 0]
    finally:
        processes.kill()


async def created(client):
    """The time of day as the router sees it."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    return (await client.post("/v1/completions", json=body)).json()["created"]


async def asked_through(clock, client, known, jump):
    """Ask again and again while the clock jumps; each answer is the undisturbed one."""
    until = time.monotonic() + SPELL_S
    answers = 0

    async def one_by_one(part):
        nonlocal answers
        while time.monotonic() < until:
            for body, text in part:
                assert await ask(client, body) == text
                answers += 1

    clients = [asyncio.create_task(one_by_one(known[n::3])) for n in range(3)]
    await asyncio.sleep(0.2)
    clock.set(jump)
    await asyncio.gather(*clients)
    assert answers > 3
    assert abs(await created(client) - time.time() - jump) < 60, "the router has not seen the jump"


def durations(url):
    """(seconds in all, how many) of every histogram of durations."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = {s.name + str(sorted(s.labels.items())): s.value for family in families for s in family.samples}
    for name, seconds in samples.items():
        if "_seconds_sum" in name:
            yield name, seconds, samples[name.replace("_seconds_sum", "_seconds_count")]


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_the_wall_clock_jumps(tmp_path):
    clock = WallClock(tmp_path)
    with started(clock.environment) as processes:
        async with httpx.AsyncClient(base_url=processes.url, timeout=300) as client:
            few = {"max_tokens": 16, "kvrail": {"codec": "raw"}}  # all that asks for the time is slow here
            known = [(body | few, await ask(client, body | few)) for body in bodies(6, seed=3)]
            for jump in JUMPS:
                await asked_through(clock, client, known, jump)
                assert processes.states() == ["healthy"] * 2
        found = list(durations(processes.url))
        assert found
        for name, seconds, count in found:
            assert 0 <= seconds <= 300 * count, name


FULL = """
import resource, sys, importlib
import numba
import kvrail.codec.core.cpu_compile
numba.config.CACHE_DIR = sys.argv[1]
sys.path.insert(0, sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no byte more goes into any file
sys.exit(importlib.import_module("kernel").twice(21) != 42)
"""
KERNEL = (
    "from kvrail.codec.core.cpu_compile import compiled\n@compiled('int64(int64)')\ndef twice(x):\n    return 2 * x\n"
)


def test_kernels_are_compiled_though_their_cache_cannot_be_written(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = subprocess.run([sys.executable, "-B", "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.nb?"))


STARTS = """
import os
from kvrail.config.settings import DecodeSettings
from kvrail.worker.starting import run_worker
async def main(*_):
    with open("/dev/full", "w") as full:
        full.write("a kernel")
raise SystemExit(run_worker(DecodeSettings(), main))
"""


def test_a_worker_that_cannot_do_without_room_says_so():
    """What compiles for GPUs keeps what it made, or fails."""
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "No space left on device; compiled kernels need room: free some" in done.stderr


@contextlib.contextmanager
def full_disk(folder):
    """A folder that takes no byte more."""
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a full disk needs root: {error}")
    try:
        (folder / "filler").write_bytes(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_disks_are_full_from_the_start(tmp_path):
    """Homes, caches, temporary files and logs: whatever a process would keep, it does without."""
    caches = ("HOME", "TMPDIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")
    with full_disk(tmp_path / "full") as full, started(dict.fromkeys(caches, str(full))) as processes:
        async with httpx.AsyncClient(base_url=processes.url, timeout=300) as client:
            asked = [body | {"kvrail": {"codec": name}} for name in CODECS for body in bodies(6, seed=4)]
            texts = [await ask(client, body) for body in asked]
            assert texts[:6] == texts[6:] and all(texts[:5])  # the last one has a single token, which may have no text
