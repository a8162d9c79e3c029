"""Bodies that would hold up everybody while they are parsed: too many members are refused, long ones take turns."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.services.router import bodies
from kvrail.services.router.bodies import MAX_NAMES, SHORT_BODY, JsonRequest, most_names
from tests.router.cluster import MODEL, Cluster

TEXTS = st.text(alphabet='a"\\:[{,é', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


def names_of(value) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(names_of, value.values()))
    return sum(map(names_of, value)) if isinstance(value, list) else 0


@given(value=VALUES, depth=st.integers(0, 2))
def test_a_bound_on_members_is_never_too_small(value, depth):
    for _ in range(depth):
        value = {"content": json.dumps(value)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_NAMES", 0)  # so that nothing is left uncounted
        assert most_names(json.dumps(value).encode()) >= names_of(value)


async def test_what_would_take_long_to_parse_is_refused(cluster: Cluster):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        for few, status in ((MAX_NAMES - 10, 400), (MAX_NAMES + 1, 413)):
            wide = {"model": MODEL, "messages": {str(number): 1 for number in range(few)}}
            answer = await http.post("/v1/chat/completions", json=wide)
            assert answer.status_code == status
            assert ("members" in answer.json()["error"]["message"]) == (status == 413)
        quoted = json.dumps({str(number): 1 for number in range(MAX_NAMES + 1)})  # JSON in a text is one string
        answer = await http.post("/tokenize", json={"model": MODEL, "prompt": quoted})
        assert answer.status_code == 200, answer.text


async def test_long_bodies_are_parsed_in_turn_and_others_come_between(monkeypatch):
    turn, seen, parsed = 0, [], bodies._parsed
    monkeypatch.setattr(bodies, "_parsed", lambda body: seen.append(turn) or parsed(body))
    app = SimpleNamespace(state=SimpleNamespace(parsing=asyncio.Lock()))
    body = json.dumps("x" * SHORT_BODY).encode()

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def read():
        value = await JsonRequest({"type": "http", "app": app, "headers": []}, receive).json()
        seen.append(turn)  # here it is checked
        return value

    reading = asyncio.gather(*(read() for _ in range(4)))
    while not reading.done():
        turn += 1
        await asyncio.sleep(0)
    assert await reading == ["x" * SHORT_BODY] * 4
    assert len(seen) == len(set(seen)) == 8
