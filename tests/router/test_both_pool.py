"""Workers of both roles in the router's pool."""

from kvrail.config.settings import RouterSettings
from kvrail.services.router.fleet.policy import WorkerState
from kvrail.services.router.fleet.worker import BothWorker
from kvrail.services.router.fleet.workers import WorkerPool
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
        worker.answer = common_pb2.WorkerStatus(roles=["prefill", "decode"], max_running=8)
        worker.compute(100)
        worker.take(1, 1, [])
        decode, prefill = found.candidates()
        assert [each.target for each in prefill] == ["a:1"]
        assert decode[0] is prefill[0] and (decode[0].load.backlog, decode[0].load.sequences) == (100, 1)
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


async def test_workers_of_one_role_beside_them():
    found = pool(workers="a:1", prefill_workers="p:1")
    found.start()
    try:
        assert (list(found.decode), list(found.prefill)) == (["a:1"], ["p:1", "a:1"])
    finally:
        await found.close()
