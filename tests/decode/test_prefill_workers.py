"""Which prefill workers a request may name, and which are asked."""

import asyncio

import pytest

from kvrail.rpc import names
from kvrail.runtime.breaker import FAILURES
from kvrail.services.decode import prefill_workers
from kvrail.services.decode.prefill_workers import AllowedWorkers, Breakers, GrpcPrefillWorkers, PrefillTarget
from kvrail.transfer import peers

NAMED = [
    "10.1.2.3:7001",
    "10.200.0.1:7001",
    "prefill:7001",
    "prefill:9999",
    "[fd00::1]:7001",
    "evil:7001",
    "127.0.0.1:1",
]


@pytest.fixture
def zone(monkeypatch):
    """What names resolve to; None: the resolver does not answer."""
    records: dict[str, list[str] | None] = {}

    async def resolve(host, port):
        if host not in records:
            raise OSError(-2, "Name or service not known")
        if records[host] is None:
            await asyncio.Event().wait()
        return [f"{address}:{port}" for address in records[host]]

    monkeypatch.setattr(names, "resolve", resolve)
    return records


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ((), NAMED),
        (("prefill",), ["prefill:7001", "prefill:9999"]),
        (("prefill:7001",), ["prefill:7001"]),
        (("10.1.0.0/16", "fd00::/8"), ["10.1.2.3:7001", "[fd00::1]:7001"]),
        (("127.0.0.1",), ["127.0.0.1:1"]),
    ],
)
async def test_only_what_a_rule_names_may_be_asked(rules, allowed, zone):
    assert await AllowedWorkers(rules).of(NAMED) == allowed


async def test_a_name_allows_every_address_that_it_has_at_the_time(zone, monkeypatch):
    monkeypatch.setattr(prefill_workers, "RESOLVED_EVERY_S", 0.0)
    allowed = AllowedWorkers(["prefill"])
    asked = ["10.0.0.1:7001", "[fd00::1]:7002", "10.0.0.2:7001"]
    assert await allowed.of(asked) == []
    zone["prefill"] = ["10.0.0.1", "[fd00::1]"]
    assert await allowed.of(asked) == asked[:2]
    zone["prefill"] = ["10.0.0.2"]
    assert await allowed.of(asked) == asked[2:]
    del zone["prefill"]  # the last answer counts until there is another
    assert await allowed.of(asked) == asked[2:]


async def test_a_name_with_a_port_allows_that_port_only(zone):
    zone["prefill"] = ["10.0.0.1"]
    assert await AllowedWorkers(["prefill:7001"]).of(["10.0.0.1:7001", "10.0.0.1:7002"]) == ["10.0.0.1:7001"]


async def test_names_are_not_resolved_for_each_request(zone):
    zone["prefill"] = ["10.0.0.1"]
    allowed = AllowedWorkers(["prefill"])
    assert await allowed.of(["10.0.0.1:7001"]) == ["10.0.0.1:7001"]
    zone["prefill"] = ["10.0.0.2"]
    assert await allowed.of(["10.0.0.2:7001"]) == []


async def test_a_resolver_that_hangs_holds_no_request_up(zone, monkeypatch):
    monkeypatch.setattr(prefill_workers, "RESOLVED_EVERY_S", 0.0)
    monkeypatch.setattr(prefill_workers, "RESOLVING_S", 0.05)
    zone["prefill"] = ["10.0.0.1"]
    allowed = AllowedWorkers(["prefill"])
    assert await allowed.of(["10.0.0.1:7001"]) == ["10.0.0.1:7001"]
    zone["prefill"] = None
    assert await allowed.of(["10.0.0.1:7001", "10.0.0.2:7001"]) == ["10.0.0.1:7001"]


async def test_channels_that_nobody_uses_are_closed(monkeypatch):
    now = 0.0
    monkeypatch.setattr(peers, "monotonic", lambda: now)
    channels = GrpcPrefillWorkers()
    first = channels.client("127.0.0.1:1")
    assert channels.client("127.0.0.1:1").host == first.host
    assert len(channels._clients) == 1
    now = 3601.0
    channels.client("127.0.0.1:2")
    assert list(channels._clients) == ["127.0.0.1:2"]
    await channels.close()


def test_failures_are_those_of_one_start_of_a_worker():
    breakers, first, anew = Breakers(), PrefillTarget("p:1", 5), PrefillTarget("p:1", 6)
    for _ in range(FAILURES):
        breakers.of(first).failed(breakers.of(first).begin())
    assert not breakers.of(first).allows
    assert breakers.of(PrefillTarget("p:2", 5)).allows
    assert breakers.of(anew).allows


def test_failures_of_workers_that_are_gone_are_forgotten(monkeypatch):
    now = 0.0
    monkeypatch.setattr(peers, "monotonic", lambda: now)
    breakers, failing = Breakers(), PrefillTarget("p:0", 5)
    for _ in range(FAILURES):
        breakers.of(failing).failed(breakers.of(failing).begin())
    for number in range(1, 1000):
        breakers.of(PrefillTarget(f"p:{number}"))
        assert not breakers.of(failing).allows  # it is in use
    assert len(breakers) == 256
    now = 3601.0
    breakers.of(PrefillTarget("p:1000"))
    assert list(breakers) == [PrefillTarget("p:1000")]
