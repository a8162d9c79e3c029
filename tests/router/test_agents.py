"""Bodies as today's agents send them: what changes nothing is taken, what means something has its effect."""

import json
from typing import Any

import anthropic
import openai
import pytest

from kvrail.services.router.responses.store import MAX_REFERENCED_BYTES
from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, OUTPUT, Cluster, run_cluster
from tests.router.scripts import error_of
from tests.router.test_responses import prompt_of
from tests.router.writing import matching

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CHAT = {
    "messages": [*HI, {"role": "assistant", "content": None, "refusal": None, "tool_calls": []}, *HI],
    "store": True,
    "verbosity": "low",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "reasoning_effort": "low",
}
RESPONSES = {
    "input": [{"role": "developer", "content": "d"}, *HI, {"role": "system", "content": "s"}, *HI],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low", "format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "context_management": [{"type": "compaction", "compact_threshold": 200_000}],
    "truncation": "auto",
    "store": False,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "client_metadata": {"a": "b"},
}
MESSAGES = {
    "max_tokens": 50,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: version=1; hash=abc;"},
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        *HI,
        {"role": "system", "content": "now be long"},
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "x=="}, {"type": "text", "text": "hello"}],
        },
        *HI,
    ],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "mcp_servers": [],
    "speed": "standard",
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "high"},
    "cache_control": {"type": "ephemeral"},
    "diagnostics": {"previous_message_id": None},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)],
    ids=["chat", "responses", "messages"],
)
async def test_what_agents_send_is_taken(cluster: Cluster, path: str, body: dict[str, Any]):
    whole = await cluster.http.post(path, json={"model": MODEL, **body})
    assert whole.status_code == 200, whole.text
    stream = await cluster.http.post(path, json={"model": MODEL, **body, "stream": True})
    assert stream.status_code == 200, stream.text
    assert not any(mark in stream.text for mark in ('"error":{', "event: error")), stream.text
    first, second = (list(request.prompt_token_ids) for request in cluster.decode[0].requests)
    assert first == second


async def test_what_of_it_reaches_the_model(cluster: Cluster, tokenizer: Tokenizer):
    await cluster.http.post("/v1/messages", json=MESSAGES)
    assert prompt_of(cluster, tokenizer) == (
        "<|system|>be brief<|end|><|user|>hi<|end|><|system|>now be long<|end|><|assistant|>hello<|end|>"
        "<|user|>hi<|end|><|assistant|>high"
    )
    await cluster.http.post("/v1/responses", json=RESPONSES)
    assert prompt_of(cluster, tokenizer) == (
        "<|system|>d<|end|><|user|>hi<|end|><|system|>s<|end|><|user|>hi<|end|><|assistant|>medium"
    )


@pytest.mark.parametrize("at", ["output_config.format", "output_format"])
async def test_anthropics_schemas(tokenizer: Tokenizer, at: str):
    async with (
        run_cluster(tokenizer) as cluster,
        anthropic.AsyncAnthropic(base_url=cluster.url, api_key="x", max_retries=0) as claude,
    ):

        def asked(schema: dict[str, Any]) -> dict[str, Any]:
            form: dict[str, Any] = {"type": "json_schema", "schema": schema}
            for name in reversed(at.split(".")):
                form = {name: form}
            return {"model": MODEL, "max_tokens": 200, "messages": HI, "extra_body": form}

        cluster.decode[0].script = matching
        answer = await claude.messages.create(**asked(SCHEMA))
        assert type(json.loads(answer.content[0].text)["ok"]) is bool
        async with claude.messages.stream(**asked(SCHEMA)) as stream:
            assert type(json.loads(await stream.get_final_text())["ok"]) is bool
        with pytest.raises(anthropic.BadRequestError, match=rf"{at}\.schema\.type:"):
            await claude.messages.create(**asked({"type": "strin"}))


async def test_what_means_something_and_is_not_had_is_refused(cluster: Cluster):
    for fields, param in (
        ({"mcp_servers": [{"type": "url", "name": "m", "url": "https://localhost"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"container": "c"}, "container"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages.0"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ):
        answer = await cluster.http.post(
            "/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": HI} | fields
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(param), answer.text
    assert cluster.decode[0].requests == []


async def test_items_are_referred_to_by_id(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer):
    first = await client.responses.create(model=MODEL, input="hi")
    listed = await client.responses.input_items.list(first.id)
    ids = [listed.data[0].id, first.output[0].id]
    asked = [*({"type": "item_reference", "id": each} for each in ids), {"role": "user", "content": "more"}]
    second = await client.responses.create(model=MODEL, input=asked)
    expected = f"<|user|>hi<|end|><|assistant|>{OUTPUT}<|end|><|user|>more<|end|><|assistant|>"
    assert prompt_of(cluster, tokenizer) == expected
    third = await client.responses.create(model=MODEL, input="end", previous_response_id=second.id)
    assert third.output_text == OUTPUT and prompt_of(cluster, tokenizer).startswith(expected)
    counted = await client.responses.input_tokens.count(model=MODEL, input=asked)
    assert counted.input_tokens == second.usage.input_tokens
    twice = await cluster.http.post("/v1/responses", json={"model": MODEL, "input": [asked[0], asked[0]]})
    assert error_of(twice, 400, None).startswith("input.1.id:")  # a few bytes each, and the whole item in the prompt
    unkept = await client.responses.create(model=MODEL, input="hi", store=False)
    for wrong in (f"{ids[1]}0", "msg_x_0", "x", "", f"resp_{'_' * 9}", unkept.output[0].id):
        body = {"model": MODEL, "input": [*HI, {"type": "item_reference", "id": wrong}]}
        answer = await cluster.http.post("/v1/responses", json=body)
        assert error_of(answer, 400, None).startswith("input.1.id:")


async def test_references_are_bounded_and_each_keys_own(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["a", "b"], max_body_bytes=32 << 20) as cluster:

        async def ask(key: str, **fields: Any):
            headers = {"authorization": f"Bearer {key}"}
            return await cluster.http.post("/v1/responses", json={"model": MODEL, **fields}, headers=headers)

        made = (await ask("a", input="hi")).json()
        reference = {"type": "item_reference", "id": made["output"][0]["id"]}
        assert (await ask("a", input=[*HI, reference])).status_code == 200
        assert error_of(await ask("b", input=[*HI, reference]), 400, None).startswith("input.1.id:")
        long = (await ask("a", input="hi", metadata={"a": "b"}, instructions=" " * 400)).json()
        entry = next(
            e for (_, each), e in cluster.server._app.state.responses._store._entries.items() if each == long["id"]
        )
        entry.input_bytes = MAX_REFERENCED_BYTES
        reference = {"type": "item_reference", "id": long["output"][0]["id"]}
        assert error_of(await ask("a", input=[*HI, reference]), 400, None).startswith("input.1.id:")
