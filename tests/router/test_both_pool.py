"""Workers of both roles in the router's pool."""

import pytest

from kvrail.config.settings import RouterSettings
from kvrail.services.router.fleet.demand import SECONDS
from kvrail.services.router.fleet.fleet import scrape_targets
from kvrail.services.router.fleet.policy import WorkerState
from kvrail.services.router.fleet.worker import BothWorker
from kvrail.services.router.fleet.workers import STATUS_INTERVAL_S, WorkerPool
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Registry
from kvrail.wire.v1 import common_pb2


def pool(**given):
    settings = RouterSettings.load(given)
    return WorkerPool(settings, RouterMetrics(Registry(), "m"))


async def test_one_object_stands_in_both_pools_with_one_load():
    found = pool(workers="a:1,b:1")
    found.start()
    try:
        assert list(found.decode) == list(found.prefill) == ["a:1", "b:1"] and len(found.workers) == 2
        worker = found.decode["a:1"]
        assert worker is found.prefill["a:1"] and isinstance(worker, BothWorker)
        assert set(found.describe("both")) == {"a:1", "b:1"} and not found.describe("decode")
        assert found.candidates()[1] == []  # no status has said that they prefill
        worker.answer = common_pb2.WorkerStatus(roles=["prefill", "decode"], max_running=8, metrics_port=9103)
        targets = scrape_targets(found, "r:1", vllm=False, router_tls=False)
        assert targets[1:] == [{"targets": ["a:9103"], "labels": {"service": "worker", "worker": "a:1"}}]
        worker.compute(100)
        worker.take(1, 1, [])
        decode, prefill = found.candidates()
        assert [each.target for each in prefill] == ["a:1"]
        assert decode[0] is prefill[0] and (decode[0].load.backlog, decode[0].load.sequences) == (100, 1)
    finally:
        await found.close()


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_an_address_of_both_roles_makes_no_other_worker(role):
    found = pool(workers="a:1", **{f"{role}_workers": "a:1,b:1"})
    found.start()
    try:
        for _ in range(3):
            found._gather()
        assert {worker.target: worker.role for worker in found.workers} == {"a:1": "both", "b:1": role}
        assert set(found._watches) == set(found.workers)
    finally:
        await found.close()


async def test_who_says_what_cannot_be_does_not_start_any_more():
    found = pool(workers="a:1")
    found.start()
    try:
        (worker,) = found.workers
        worker.lost("not there yet")
        found.reconsider()
        assert worker.state is WorkerState.STARTING and str(worker) == "worker a:1"
        worker.lost("the peer says that it only prefills", wrong=True)
        found.reconsider()
        assert worker.state is WorkerState.INCOMPATIBLE and "only prefills" in worker.detail
    finally:
        await found.close()


async def test_prompts_of_other_routers_count(monkeypatch):
    found = pool(workers="a:1")
    found.start()
    (worker,) = found.workers
    now, instance = 100.0, 1
    monkeypatch.setattr(worker._clock, "_read_s", lambda: now)

    async def say(computed: int) -> float:
        async def status(*_, **__):
            report = common_pb2.WorkerReport(prompt_tokens=computed)
            return common_pb2.WorkerStatus(instance=instance, report=report, roles=["prefill", "decode"])

        monkeypatch.setattr(worker._client, "get_status", status)
        await worker.ask()
        return worker.load().tokens_per_s

    try:
        assert await say(10**6) == 0  # what was computed before this router came
        for half in range(1, 61):
            now += STATUS_INTERVAL_S
            if half % 4 == 0:  # statuses may be late, and this router has hardly any request meanwhile
                worker.compute(300)  # of ours
                now += 2 * STATUS_INTERVAL_S
            rate = await say(10**6 + round(1000 * (now - 100)))
        assert rate == pytest.approx(1000, rel=0.12)  # just behind one of them
        instance = 2  # a new process counts anew
        assert await say(50_000) <= rate
        now += 1
        worker.compute(5000)  # more than it can compute
        assert await say(50_100) > 750
    finally:
        await found.close()


async def test_time_counts_for_all_workers_while_one_has_a_request(monkeypatch):
    found = pool(workers="a:1,b:1")
    found.start()
    a, b = found.workers
    now = 100.0
    monkeypatch.setattr(a._clock, "_read_s", lambda: now)
    a._clock.prompt()

    def rate_of_a():
        return a._given.read()

    try:
        b.take(1, 1, [])
        a.compute(30_000)
        now += 1
        before = rate_of_a()
        now += SECONDS
        assert rate_of_a() < before / 2
        before = rate_of_a()
        b.leave(1, 1, [])
        now += SECONDS
        assert rate_of_a() > 0.85 * before > 0
    finally:
        await found.close()


async def test_workers_of_one_role_beside_them():
    found = pool(workers="a:1", prefill_workers="p:1")
    found.start()
    try:
        assert (list(found.decode), list(found.prefill)) == (["a:1"], ["p:1", "a:1"])
    finally:
        await found.close()
