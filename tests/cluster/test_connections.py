"""Requests in company whose KV crosses on several connections each, sealed or not: the answers that they get alone."""

import asyncio

import pytest

from kvrail.transport import tcp
from kvrail.transport.tcp import messages
from kvrail.transport.tcp.ends import TcpSender
from tests.certificates import Authority
from tests.cluster.cluster import cluster
from tests.cluster.test_equality import prompt_of
from tests.models import tiny_model

KINDS = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.7, "top_p": 0.8, "seed": 7},
    {"temperature": 1.0, "top_k": 20, "seed": 9, "presence_penalty": 0.5},
    {"temperature": 0.8, "min_p": 0.1, "seed": 11, "n": 2},
    {"logprobs": 2},
)
LENGTHS = (65, 500, 1100, 190)
ASKED = [(prompt_of(length, seed=number), kind) for number, kind in enumerate(KINDS) for length in LENGTHS]
ALONE = []


@pytest.fixture(params=["plain", "sealed"])
def authority(request, tmp_path):
    return Authority(tmp_path) if request.param == "sealed" else None


@pytest.fixture
def connected(monkeypatch):
    """Small payloads are divided as large ones are on a machine with many cores; yields each connection's place."""
    monkeypatch.setattr(tcp, "usable_cores", lambda: 8)
    monkeypatch.setattr(messages, "LEAST_PART_BYTES", 512)
    places, connect = [], TcpSender.connect
    monkeypatch.setattr(
        TcpSender, "connect", lambda self, place, connection: places.append(place) or connect(self, place, connection)
    )
    return places


async def alone():
    """What each gets where the decode worker computes it itself, asked once for all tests."""
    if not ALONE:
        async with cluster(tiny_model("llama"), "tcp") as c:
            ALONE.extend([(await c.ask(prompt, local=True, **kind)).tokens for prompt, kind in ASKED])
    return ALONE


async def test_every_kind_of_request_beside_clients_that_leave(authority, connected):
    expected = await alone()
    async with cluster(tiny_model("llama"), "tcp", authority=authority) as c:
        leaving = [asyncio.create_task(c.ask(prompt_of(1100, seed=100 + number))) for number in range(8)]
        asking = [asyncio.create_task(c.ask(prompt, **kind)) for prompt, kind in ASKED]
        for number, each in enumerate(leaving):
            await asyncio.sleep(0.01 * number)
            each.cancel()
        answers = await asyncio.gather(*asking)
        await asyncio.gather(*leaving, return_exceptions=True)
        assert [answer.tokens for answer in answers] == expected
        assert all(answer.summary.prefill_worker for answer in answers)
        await c.settled()
    assert {place.number for place in connected} == set(range(messages.MOST_CONNECTIONS))
