"""An engine must take steps while requests wait for one; the watch reports an engine that does not."""

import asyncio

import pytest

from kvrail.engine import watch
from tests.engine.bench import Bench


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watch, "STALLED_S", 0.3)


async def said(engine, within_s: float = 1.0) -> str | None:
    """What the watch reports within these seconds, if anything."""
    try:
        async with asyncio.timeout(within_s):
            return await watch.broken(engine, 60.0)
    except TimeoutError:
        return None


async def test_an_idle_engine_is_healthy():
    assert await said(Bench().engine) is None


@pytest.mark.parametrize("remote", [False, True])
async def test_an_engine_that_takes_no_step_though_a_request_waits_is_broken(remote):
    """A request that awaits KV after its transfer has released the lease waits for nothing either."""
    bench = Bench()
    bench.submit("r", [1, 2, 3], remote=remote)
    if remote:
        bench.engine.release_lease(bench.engine.claim_lease("r"))
    assert await said(bench.engine) == "0 sequences wait and 1 run, but for 0.3 s no step was taken"


async def test_steps_without_work_do_not_count(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.1)  # no step without work takes as long, on a busy machine either
    bench = Bench()
    bench.submit("r", [1, 2, 3])
    bench.scheduler.schedule = list
    bench.engine.start()  # it steps as fast as it can
    assert "no step was taken" in await said(bench.engine, 30.0)
    bench.engine.stop()


async def test_a_transfer_may_take_its_time():
    bench = Bench(num_pages=8)
    bench.submit("r", [1] * 20, remote=True)
    bench.submit("needs its pages", [2] * 20)
    lease = bench.engine.claim_lease("r")
    assert await said(bench.engine) is None
    bench.engine.abort("r")  # the transfer may still write
    assert await said(bench.engine) is None
    bench.engine.release_lease(lease)
    assert "0 sequences wait and 1 run" in await said(bench.engine)


async def test_an_engine_whose_steps_follow_each_other_is_healthy():
    bench = Bench()
    bench.submit("r", [1, 2, 3], max_tokens=100)
    watching = asyncio.create_task(said(bench.engine))
    for _ in range(40):
        bench.step(1)
        await asyncio.sleep(0.025)
    assert await watching is None
