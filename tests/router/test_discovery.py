"""Workers behind a DNS name: they join and leave while requests run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrail.config.settings import RouterSettings
from kvrail.errors import ConfigError
from kvrail.rpc import names
from kvrail.services.router.fleet import discovery, workers
from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, OUTPUT, Cluster, run_cluster, status, until, write_output
from tests.router.scripts import able_prefill, error_of

DECODE, PREFILL = "dns+decode:7002", "dns+prefill:7001"


class Zone:
    """The DNS of a test: addresses by name; without any a name does not resolve."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}

    async def resolve(self, host: str, port: int) -> list[str]:
        if not self.records.get(host):
            raise OSError(-2, "Name or service not known")
        return sorted(self.records[host])


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Zone:
    made = Zone()
    monkeypatch.setattr(names, "resolve", made.resolve)
    monkeypatch.setattr(discovery, "INTERVAL_S", 0.05)
    return made


@asynccontextmanager
async def discovering(tokenizer: Tokenizer, zone: Zone, *, decode: int, prefill: int = 0) -> AsyncIterator[Cluster]:
    """A router that knows its workers by name; the zone has the first decode worker and all prefill workers."""
    settings = {
        "decode_workers": (DECODE,),
        "prefill_workers": (PREFILL,) if prefill else (),
    }
    async with run_cluster(tokenizer, decode=decode, prefill=prefill, wait_healthy=False, **settings) as cluster:
        zone.records["decode"] = [cluster.decode[0].target]
        zone.records["prefill"] = [worker.target for worker in cluster.prefill]
        await until(lambda: cluster.service.pool.complete and not cluster.service.pool.starting)
        yield cluster


async def health(cluster: Cluster) -> dict:
    return (await cluster.http.get("/health")).json()


async def test_a_name_that_does_not_resolve_yet(tokenizer: Tokenizer, zone: Zone, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "STARTUP_WAIT_S", 0.1)
    waiting = run_cluster(tokenizer, prefill=0, wait_healthy=False, decode_workers=(DECODE,), prefill_workers=())
    async with waiting as cluster:
        said = await health(cluster)
        assert said["status"] == "starting"
        assert said["decode_workers"] == {}
        metrics = (await cluster.http.get("/metrics")).text  # what the alert KvrailNoDecodeWorker then rests on
        assert "kvrail_worker_up{" not in metrics and f'kvrail_queue_prompts{{model_name="{MODEL}"}} 0.0' in metrics
        await until(lambda: "known" in cluster.service.pool.unresolved[DECODE])
        message = error_of(await cluster.chat(), 503, "worker_unavailable")
        assert f"{DECODE} does not resolve: Name or service not known" in message
        zone.records["decode"] = [cluster.decode[0].target]
        await until(lambda: cluster.service.pool.complete)
        assert (await cluster.chat()).json()["choices"][0]["message"]["content"] == OUTPUT
        said = await health(cluster)
        assert said["status"] == "ok"
        assert said["dns"] == {DECODE: {"addresses": [cluster.decode[0].target]}}


async def test_workers_join_and_leave_under_load_without_a_failed_request(tokenizer: Tokenizer, zone: Zone):
    async with discovering(tokenizer, zone, decode=4, prefill=2) as cluster:
        pool, done = cluster.service.pool, asyncio.Event()
        texts: list[str] = []

        async def client() -> None:
            while not done.is_set():
                answer = await cluster.chat()
                assert answer.status_code == 200, answer.text
                texts.append(answer.json()["choices"][0]["message"]["content"])

        clients = [asyncio.create_task(client()) for _ in range(6)]
        # One joins, one leaves, all are replaced at once, one comes back.
        for present in ((0, 1), (1,), (2, 3), (3,), (0, 1, 2, 3), (0,)):
            targets = {cluster.decode[i].target for i in present}
            zone.records["decode"] = sorted(targets)
            zone.records["prefill"] = [cluster.prefill[present[0] % 2].target]
            await until(lambda targets=targets: set(pool.decode) == targets and pool.complete)
            seen = {i: len(cluster.decode[i].requests) for i in present}
            await until(lambda seen=seen: all(len(cluster.decode[i].requests) > n for i, n in seen.items()))
        done.set()
        await asyncio.gather(*clients)
        assert set(texts) == {OUTPUT}
        assert able_prefill(pool) == [cluster.prefill[0].target]
        await until(lambda: not pool.leaving)
        shown = (await cluster.http.get("/metrics")).text
        assert cluster.decode[0].target in shown
        assert cluster.decode[1].target not in shown


async def test_a_request_that_comes_while_all_workers_are_replaced_waits_for_the_new_ones(
    tokenizer: Tokenizer, zone: Zone
):
    async with discovering(tokenizer, zone, decode=2) as cluster:
        first, second = cluster.decode
        second.hung = True
        zone.records["decode"] = [second.target]
        await until(lambda: list(cluster.service.pool.decode) == [second.target])
        asked = asyncio.create_task(cluster.chat())
        await asyncio.sleep(0.2)
        assert not asked.done()
        second.hung = False
        assert (await asked).status_code == 200
        assert (len(first.requests), len(second.requests)) == (0, 1)


async def test_a_worker_that_leaves_finishes_what_it_has_and_may_come_back(tokenizer: Tokenizer, zone: Zone):
    async with discovering(tokenizer, zone, decode=2) as cluster:
        first, second = cluster.decode
        pool, goes_on = cluster.service.pool, asyncio.Event()

        async def slow(worker, request):
            async for reply in write_output(worker, request):
                yield reply
                await goes_on.wait()

        first.script = slow
        running = asyncio.create_task(cluster.chat())
        await until(lambda: bool(first.requests))
        known = pool.decode[first.target]
        zone.records["decode"] = [second.target]
        await until(lambda: list(pool.decode) == [second.target] and pool.healthy)
        assert (await cluster.chat()).status_code == 200
        await until(lambda: known.state == "draining")
        assert set((await health(cluster))["decode_workers"]) == {first.target, second.target}
        shown = (await cluster.http.get("/status.json")).json()["workers"]
        assert {each["address"]: each["ours"] for each in shown} == {first.target: 1, second.target: 0}
        zone.records["decode"] = [first.target, second.target]
        await until(lambda: len(pool.decode) == 2)
        assert pool.decode[first.target] is known
        zone.records["decode"] = [second.target]
        await until(lambda: bool(pool.leaving))
        goes_on.set()
        assert (await running).json()["choices"][0]["message"]["content"] == OUTPUT
        assert (len(first.requests), len(second.requests)) == (1, 1)
        await until(lambda: not pool.leaving)
        assert set((await health(cluster))["decode_workers"]) == {second.target}


async def test_a_name_that_stops_resolving_keeps_the_workers_that_answer(
    tokenizer: Tokenizer, zone: Zone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(workers, "KEPT_S", 2.0)
    async with discovering(tokenizer, zone, decode=2) as cluster:
        first, second = cluster.decode
        pool = cluster.service.pool
        zone.records["decode"] = [first.target, second.target]
        await until(lambda: len(pool.decode) == 2 and pool.complete)
        zone.records["decode"] = []
        await until(lambda: bool(pool.unresolved))
        said = await health(cluster)
        assert said["status"] == "degraded"
        assert said["dns"][DECODE]["detail"] == "does not resolve: Name or service not known"
        assert len(said["dns"][DECODE]["addresses"]) == 2
        assert "its 2 workers are kept while they answer" in caplog.text
        first.hung = True  # it says nothing any more
        await until(lambda: list(pool.decode) == [second.target])
        assert (await cluster.chat()).status_code == 200
        zone.records["decode"] = [second.target]
        await until(lambda: pool.complete)
        assert (await health(cluster))["status"] == "ok"


async def test_what_cannot_be_used_ends_no_look_at_a_name(
    tokenizer: Tokenizer, zone: Zone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with discovering(tokenizer, zone, decode=2) as cluster:
        pool, targets = cluster.service.pool, [worker.target for worker in cluster.decode]
        with monkeypatch.context() as broken:
            broken.setattr(pool, "reconsider", lambda: 1 / 0)
            await until(lambda: f"{DECODE}: what the name says could not be used" in caplog.text)
        zone.records["decode"] = targets
        await until(lambda: sorted(pool.decode) == sorted(targets))


async def test_a_worker_with_two_addresses_is_used_once(tokenizer: Tokenizer, zone: Zone):
    async with discovering(tokenizer, zone, decode=1) as cluster:
        (worker,) = cluster.decode
        worker.status = status(instance=7)
        other = worker.target.replace("127.0.0.1", "localhost")
        zone.records["decode"] = [worker.target, other]
        pool = cluster.service.pool
        await until(lambda: other in pool.decode and pool.decode[other].state == "duplicate")
        assert [each.target for each in pool.healthy_decode()] == [worker.target]
        assert (await health(cluster))["status"] == "ok"


async def test_a_name_resolves_to_every_address_that_the_system_knows():
    found = await names.resolve("localhost", 7002)
    assert found
    assert set(found) <= {"127.0.0.1:7002", "[::1]:7002"}
    assert await names.resolve("192.0.2.7", 7002) == ["192.0.2.7:7002"]


@pytest.mark.parametrize("written", ["dns+decode", "dns+:7002", "dns+decode:0"])
def test_a_name_without_host_or_port_is_refused(written: str):
    with pytest.raises(ConfigError, match="write each address as host:port"):
        RouterSettings.load({"served_model_name": MODEL, "decode_workers": written})
