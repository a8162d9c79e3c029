"""/v1/messages as Anthropic's client sees it."""

import anthropic
import openai
import pytest

from kvrail.errors import OverloadedError, WorkerUnavailableError
from kvrail.text import Tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import CONTEXT, MODEL, OUTPUT, Cluster, run_cluster, summary
from tests.router.scripts import failing
from tests.router.test_responses import prompt_of
from tests.router.test_tools import roomy
from tests.router.writing import saying

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def claude(cluster: Cluster):
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="unused", max_retries=0) as made:
        yield made


async def test_answer_and_what_the_worker_was_asked(claude, cluster: Cluster, tokenizer: Tokenizer):
    answer = await claude.messages.create(
        model=MODEL,
        max_tokens=50,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        extra_body={"seed": 7, "temperature": 0.25, "top_p": 0.5, "top_k": 3},
    )
    assert [(block.type, block.text) for block in answer.content] == [("text", OUTPUT)]
    assert (answer.type, answer.role, answer.stop_reason, answer.model) == ("message", "assistant", "end_turn", MODEL)
    assert prompt_of(cluster, tokenizer) == (
        "<|system|>be brief<|end|><|user|>a\nb<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"
    )
    asked = cluster.decode[0].requests[0]
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (50, 0.25, 0.5, 3)
    assert (list(sampling.stop), sampling.seed) == (["x"], 7)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(asked.prompt_token_ids)
    assert usage.output_tokens == len(tokenizer.encode(OUTPUT, add_special_tokens=False))


async def test_the_beginning_of_an_answer_is_continued(claude, cluster: Cluster, tokenizer: Tokenizer):
    await claude.messages.create(model=MODEL, max_tokens=5, messages=[*HI, {"role": "assistant", "content": "Hel"}])
    assert prompt_of(cluster, tokenizer) == "<|user|>hi<|end|><|assistant|>Hel"


async def test_stream(claude):
    kinds = []
    async with claude.messages.stream(model=MODEL, max_tokens=50, messages=HI) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()
    raw = [event async for event in await claude.messages.create(model=MODEL, max_tokens=3, messages=HI, stream=True)]
    assert final.content[0].text == OUTPUT
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0
    expected = ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"]
    assert list(dict.fromkeys(event.type for event in raw if event.type != "ping")) == [*expected, "message_stop"]
    assert raw[-2].delta.stop_reason == "max_tokens"


async def test_stop_sequence(claude, cluster: Cluster):
    async def stopped(worker, request):
        yield decode_pb2.GenerateReply(token_ids=[11], text="ab", finish_reason=1, stop_reason="END")
        yield decode_pb2.GenerateReply(summary=summary(len(request.prompt_token_ids), 1))

    cluster.decode[0].script = stopped
    answer = await claude.messages.create(model=MODEL, max_tokens=5, messages=HI, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")


async def test_count_tokens(claude, tokenizer: Tokenizer):
    counted = await claude.messages.count_tokens(model=MODEL, messages=HI, system="be brief")
    text = "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    assert counted.input_tokens == len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.usefixtures("few_refusals")
async def test_errors_have_anthropics_shape(claude, cluster: Cluster):
    with pytest.raises(anthropic.BadRequestError, match="image") as caught:
        image = {"type": "image", "source": {"type": "url", "url": "https://localhost/x.png"}}
        await claude.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [image]}])
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["request_id"] == caught.value.request_id == caught.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="other", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="context"):
        await claude.messages.create(model=MODEL, max_tokens=CONTEXT, messages=HI)
    for fields, name in (
        ({}, "max_tokens"),
        ({"max_tokens": 5, "mcp_servers": [{}]}, "mcp_servers"),
        ({"max_tokens": 5, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type"),
        ({"max_tokens": 5, "tools": [{"name": "f", "strict": 5}]}, "tools.0.strict"),
        ({"max_tokens": 5, "tools": [{"name": "f", "input_schema": 5}]}, "tools.0.input_schema"),
        ({"max_tokens": 5, "system": 5}, "system"),
    ):
        answer = await cluster.http.post("/v1/messages", json={"model": MODEL, "messages": HI, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(f"{name}:"), answer.text
    cluster.decode[0].script = failing(OverloadedError("full"))
    with pytest.raises(anthropic.RateLimitError):
        await claude.messages.create(model=MODEL, max_tokens=5, messages=HI)
    cluster.decode[0].script = failing(WorkerUnavailableError("gone"), after=2)
    stream = await claude.messages.create(model=MODEL, max_tokens=5, messages=HI, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="gone") as caught:
        async for _ in stream:
            pass
    assert caught.value.body["request_id"] == stream.response.headers["x-request-id"]


async def test_keys(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["first", "second"]) as cluster:
        for key, fine in (("second", True), ("wrong", False)):
            async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key=key, max_retries=0) as claude:
                if fine:
                    answer = await claude.messages.create(model=MODEL, max_tokens=5, messages=HI)
                    assert answer.content
                else:
                    with pytest.raises(anthropic.AuthenticationError) as caught:
                        await claude.messages.create(model=MODEL, max_tokens=5, messages=HI)
                    assert caught.value.body["error"]["type"] == "authentication_error"
        assert (await cluster.http.get("/v1/models", headers={"x-api-key": "first"})).status_code == 200


async def test_a_call_of_a_tool_ends_the_message_whatever_follows(tokenizer: Tokenizer):
    tool = {"name": "look_up", "description": "Look up", "input_schema": {"type": "object", "properties": {}}}
    call = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'

    async def calling(worker, request):
        yield decode_pb2.GenerateReply(token_ids=[10], text=call)
        yield decode_pb2.GenerateReply(token_ids=[11], finish_reason=1, stop_reason="END")
        yield decode_pb2.GenerateReply(summary=summary(1, 2))

    async with (
        roomy(tokenizer) as cluster,
        anthropic.AsyncAnthropic(base_url=cluster.url, api_key="unused", max_retries=0) as claude,
    ):
        cluster.decode[0].script = calling
        asked = {"model": MODEL, "max_tokens": 50, "tools": [tool], "messages": HI, "stop_sequences": ["END"]}
        answer = await claude.messages.create(**asked)
        assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"a": NaN, "b": [-Infinity, 1e999, 1.5]}', {"a": None, "b": [None, None, 1.5]}), ('{"a": ' + "[" * 1500, {})],
)
async def test_arguments_that_are_no_json_are_told_as_far_as_json_can(tokenizer: Tokenizer, arguments: str, read):
    async with (
        roomy(tokenizer) as cluster,
        anthropic.AsyncAnthropic(base_url=cluster.url, api_key="unused", max_retries=0) as claude,
    ):
        cluster.decode[0].script = saying(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', 100)
        answer = await claude.messages.create(model=MODEL, max_tokens=2000, tools=[{"name": "f"}], messages=HI)
        assert answer.content[0].input == read


async def test_tools(tokenizer: Tokenizer):
    async with (
        roomy(tokenizer) as cluster,
        anthropic.AsyncAnthropic(base_url=cluster.url, api_key="unused", max_retries=0) as claude,
    ):
        await call_a_tool(claude, cluster, tokenizer)


async def call_a_tool(claude: anthropic.AsyncAnthropic, cluster: Cluster, tokenizer: Tokenizer) -> None:
    tool = {"name": "look_up", "description": "Look up", "input_schema": {"type": "object", "properties": {}}}
    cluster.decode[0].script = saying(
        'I look.\n<tool_call>\n{"name": "look_up", "arguments": {"a": "b"}}\n</tool_call>'
    )
    asked = {"model": MODEL, "max_tokens": 100, "tools": [tool], "messages": HI}
    answer = await claude.messages.create(**asked)
    text, call = answer.content
    assert (text.text, call.name, call.input, answer.stop_reason) == ("I look.", "look_up", {"a": "b"}, "tool_use")
    async with claude.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in streamed.content] == ["text", "tool_use"]
    assert (streamed.content[1].input, streamed.stop_reason) == ({"a": "b"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "found"}]}
    history = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    await claude.messages.create(**(asked | {"messages": history}))
    assert "found" in prompt_of(cluster, tokenizer)
    bare = await claude.messages.count_tokens(model=MODEL, messages=HI)
    offered = await claude.messages.count_tokens(model=MODEL, messages=HI, tools=[tool])
    assert offered.input_tokens > bare.input_tokens + 10
    forced = await claude.messages.create(**asked, tool_choice={"type": "tool", "name": "look_up"})
    assert forced.stop_reason == "tool_use"
    assert cluster.decode[0].requests[-1].sampling.grammar
    await claude.messages.create(**asked)
    assert not cluster.decode[0].requests[-1].sampling.grammar
    await claude.messages.create(**(asked | {"tools": [{**tool, "strict": True}]}))
    assert cluster.decode[0].requests[-1].sampling.grammar
    await claude.messages.create(**asked, tool_choice={"type": "none"})
    assert not cluster.decode[0].requests[-1].sampling.grammar


async def test_models_for_anthropics_client_and_for_others(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, served_model_name=f"{MODEL},other") as cluster:
        strict = anthropic.AsyncAnthropic(
            base_url=cluster.url, api_key="unused", max_retries=0, _strict_response_validation=True
        )
        async with strict as client:
            found = [model async for model in await client.models.list()]
            assert [(model.id, model.display_name, model.type) for model in found] == [
                (name, name, "model") for name in (MODEL, "other")
            ]
            assert found[0].max_input_tokens == CONTEXT and found[0].created_at.year > 2000
            assert (await client.models.retrieve("other")).id == "other"
            with pytest.raises(anthropic.NotFoundError) as refused:
                await client.models.retrieve("unknown")
            assert refused.value.body["error"]["type"] == "not_found_error"
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
            assert [model.object async for model in client.models.list()] == ["model"] * 2
            assert (await cluster.http.get("/v1/models/other")).json()["owned_by"] == "kvrail"
