"""Bodies that would hold up everybody while they are parsed: too many members are refused, long ones take turns."""

import asyncio
import json
import threading
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.runtime.turns import Turns
from kvrail.services.router.http import biases, bodies
from kvrail.services.router.http.bodies import MAX_NAMES, SHORT_BODY, JsonRequest, most_names
from kvrail.wire.convert import MAX_BIASES
from tests.router.cluster import MODEL, Cluster, until

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


async def test_long_bodies_are_parsed_in_turns_of_clients(monkeypatch):
    begun, gate, first, parsed = [], threading.Event(), asyncio.Event(), bodies._parsed
    loop = asyncio.get_running_loop()

    def blocked(body):
        begun.append(parsed(body)[0])
        loop.call_soon_threadsafe(first.set)
        gate.wait()
        return begun[-1]

    monkeypatch.setattr(bodies, "_parsed", blocked)
    app = SimpleNamespace(state=SimpleNamespace(parsing=Turns()))

    async def read(client, name):
        async def receive():
            body = json.dumps([name, "x" * SHORT_BODY]).encode()
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "app": app, "headers": [], "state": {"client": client}}
        return await JsonRequest(scope, receive).json()

    tasks = [asyncio.create_task(read("greedy", f"greedy {i}")) for i in range(3)]
    await first.wait()
    tasks.append(asyncio.create_task(read("modest", "modest")))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*tasks) == ["greedy 0", "greedy 1", "greedy 2", "modest"]
    assert begun == ["greedy 0", "modest", "greedy 1", "greedy 2"]


async def test_a_bias_as_wide_as_a_vocabulary(cluster: Cluster):
    """It comes to the worker as it was sent, whatever is around it, and what is wrong in it is said."""
    cluster.decode[0].status.model.vocab_size = 200_000
    pool = cluster.service.pool
    await until(lambda: pool.limits().vocabulary == 200_000)
    wide = {str(number): (number % 400 - 200) / 2 for number in range(150_000)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"logit_bias": {"1": 2}}}}}
    tools = {"tools": [tool], "tool_choice": "none"}
    for fields in ({"logit_bias": wide}, {"logit_bias": wide, **tools}, {**tools, "logit_bias": wide}):
        answer = await cluster.chat(**fields)
        assert answer.status_code == 200, answer.text
        asked = cluster.decode[0].requests[-1].sampling.logit_bias
        assert dict(asked) == {int(key): value for key, value in wide.items()}
    for wrong, why in (({"200000": 1.0}, "vocabulary"), ({"7": 101.0}, "100"), ({"8,9": 1.0}, "logit_bias")):
        answer = await cluster.chat(logit_bias=wide | wrong)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    assert (await cluster.complete(prompt=["x"] * 8, logit_bias=wide)).json()["error"]["param"] == "logit_bias"
    nested = await cluster.chat(kvrail={"logit_bias": wide})
    assert nested.status_code == 400 and "members" in nested.json()["error"]["message"]
    too_many = await cluster.chat(logit_bias=dict.fromkeys(map(str, range(MAX_BIASES + 1)), 1))
    assert too_many.status_code == 413


@given(
    bias=st.dictionaries(st.text("0123456789", min_size=1, max_size=4), st.floats(-100, 100)),
    after=st.booleans(),
    indent=st.sampled_from([None, 1]),
    piece=st.integers(1, 40),
)
def test_a_bias_read_apart_is_what_the_parser_gives(bias, after, indent, piece):
    body = {"logit_bias": bias, "model": "m"} if after else {"model": "m", "logit_bias": bias}
    text = json.dumps(body, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(biases, "WIDE", 0)
        patch.setattr(biases, "PIECE", piece)
        place = biases.span(text)
        rest = json.loads(biases.without(text, *place))
        assert biases.is_marked(rest)
        if not bias:
            return
        rest["logit_bias"] = biases.parsed(text[slice(*place)])
        assert rest == body
        with pytest.raises(ValueError, match="comma"):
            biases.parsed(text[slice(*place)] + b" , ")


@pytest.mark.parametrize("number", ["1e400", "-1E+999", "1" + "0" * 400 + ".5", "Infinity", "NaN"])
async def test_a_number_beyond_a_double_is_no_json(cluster: Cluster, number: str):
    body = f'{{"model": "{MODEL}", "prompt": "x", "metadata": {{"deep": [{number}]}}}}'
    headers = {"content-type": "application/json"}
    answer = await cluster.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    told = json.dumps({"model": MODEL, "prompt": f"[{number}]"})
    assert (await cluster.http.post("/v1/completions", content=told, headers=headers)).status_code == 200
