"""/v1/responses as the official client sees it."""

import asyncio
import gc
import json

import openai
import pytest

from kvrail.errors import KvrailError
from kvrail.services.router.answer.answer import Answer
from kvrail.services.router.responses import store
from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, OUTPUT, Cluster, logprobs_for, run_cluster, until, write_output
from tests.router.scripts import error_of, failing, hanging
from tests.router.test_refusals import check_error
from tests.router.test_tools import roomy
from tests.router.writing import matching, saying

TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def prompt_of(cluster: Cluster, tokenizer: Tokenizer, place: int = -1) -> str:
    return tokenizer.decode(list(cluster.decode[0].requests[place].prompt_token_ids), skip_special_tokens=False)


async def test_answer_and_what_the_worker_was_asked(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer):
    answer = await client.responses.create(
        model=MODEL,
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        max_output_tokens=50,
        temperature=0.25,
        top_p=0.5,
        metadata={"run": "1"},
        extra_body={"seed": 7, "kvrail": {"codec": "splitzip"}},
    )
    assert answer.output_text == OUTPUT
    assert (answer.object, answer.status, answer.error, answer.metadata) == (
        "response",
        "completed",
        None,
        {"run": "1"},
    )
    assert [item.type for item in answer.output] == ["message"]
    assert prompt_of(cluster, tokenizer) == (
        "<|system|>be brief<|end|><|user|>a\nb<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"
    )
    asked = cluster.decode[0].requests[0]
    assert (asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.seed) == (50, 0.25, 7)
    assert asked.codec == "splitzip"
    generated = len(tokenizer.encode(OUTPUT, add_special_tokens=False))
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(asked.prompt_token_ids), generated)
    assert answer.usage.input_tokens_details.cached_tokens == 3


async def test_every_event_in_its_order(client: openai.AsyncOpenAI):
    events = [event async for event in await client.responses.create(model=MODEL, input="hi", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == TEXT_EVENTS
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == OUTPUT
    assert next(event.text for event in events if event.type == "response.output_text.done") == OUTPUT
    assert events[0].response.status == "in_progress"
    assert events[-1].response.output_text == OUTPUT
    assert events[-1].response.usage.output_tokens > 0
    async with client.responses.stream(model=MODEL, input="hi") as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == OUTPUT


async def test_cut_off(client: openai.AsyncOpenAI):
    answer = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    events = [e async for e in await client.responses.create(model=MODEL, input="hi", max_output_tokens=2, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_log_probabilities(client: openai.AsyncOpenAI, tokenizer: Tokenizer):
    include = ["message.output_text.logprobs"]
    answer = await client.responses.create(model=MODEL, input="hi", include=include, top_logprobs=2)
    told = answer.output[0].content[0].logprobs
    ids = tokenizer.encode(OUTPUT, add_special_tokens=False)
    assert [entry.token for entry in told] == [tokenizer.token_text(i) for i in ids]
    assert [len(entry.top_logprobs) for entry in told] == [2] * len(ids)


@pytest.mark.parametrize(
    ("written", "items"),
    [
        ('<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>', ["function_call"]),
        ('I look.<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>', ["message", "function_call"]),
        ('<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_c', ["function_call"]),  # cut by the length
    ],
)
async def test_log_probabilities_are_those_of_text(tokenizer: Tokenizer, written: str, items: list[str]):
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}
    asked = {"model": MODEL, "input": "hi", "tools": [tool], "include": ["message.output_text.logprobs"]}

    async def script(worker, request):
        async for reply in saying(written)(worker, request):
            reply.logprobs.extend(logprobs_for(token_id, 0) for token_id in reply.token_ids)
            yield reply

    async with (
        roomy(tokenizer) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        cluster.decode[0].script = script
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        for answer in (whole, streamed):
            assert [item.type for item in answer.output] == items
            told = [entry for item in answer.output if item.type == "message" for entry in item.content[0].logprobs]
            assert bool(told) == ("message" in items)


async def test_what_is_kept(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer):
    first = await client.responses.create(model=MODEL, input="one", instructions="be brief")
    assert (await client.responses.retrieve(first.id)).output_text == OUTPUT
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert prompt_of(cluster, tokenizer) == (
        f"<|user|>one<|end|><|assistant|>{OUTPUT}<|end|><|user|>two<|end|><|assistant|>"
    )
    listed = await client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in listed.data] == ["one", OUTPUT, "two"]
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert (newest.data[0].content[0].text, newest.has_more) == ("two", True)
    older = await client.responses.input_items.list(second.id, limit=5, after=newest.data[0].id)
    assert [item.content[0].text for item in older.data] == [OUTPUT, "one"]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    forgotten = await client.responses.create(model=MODEL, input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(forgotten.id)


async def test_the_store_is_bounded_and_each_keys_own(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "ENTRY_BYTES", 400 << 10)  # two in a MiB
    async with run_cluster(tokenizer, api_keys=["a", "b"], stored_responses_mib=1) as cluster:

        def client(key: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0)

        async with client("a") as mine, client("b") as other:
            ids = [(await mine.responses.create(model=MODEL, input="x")).id for _ in range(3)]
            with pytest.raises(openai.NotFoundError):
                await mine.responses.retrieve(ids[0])
            assert (await mine.responses.retrieve(ids[2])).id == ids[2]
            with pytest.raises(openai.NotFoundError):
                await other.responses.retrieve(ids[2])
            with pytest.raises(openai.BadRequestError):
                await other.responses.create(model=MODEL, input="x", previous_response_id=ids[2])


async def test_cancel_while_in_progress(client: openai.AsyncOpenAI, cluster: Cluster):
    cluster.decode[0].script = hanging(after=1)
    stream = await client.responses.create(model=MODEL, input="hi", stream=True)
    begun = await anext(stream)
    response_id = begun.response.id
    assert (await client.responses.retrieve(response_id)).status == "in_progress"
    assert (await client.responses.cancel(response_id)).status == "cancelled"
    with pytest.raises(openai.APIError, match="cancelled"):
        async for event in stream:
            if event.type == "error":
                raise openai.APIError(event.message, None, body=None)
    await asyncio.wait_for(cluster.decode[0].cancelled.wait(), 10)
    assert (await client.responses.retrieve(response_id)).status == "cancelled"
    assert await cluster.metric('kvrail_requests_total{outcome="cancelled"}') == 1
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(response_id)


async def test_cancel_before_there_is_any_output(tokenizer: Tokenizer):
    """While it waits for its turn, and while its worker computes the prompt; whoever else asks goes on."""
    async with (
        run_cluster(tokenizer, stream_head_s=0.02, keep_alive_s=0.05) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        worker = cluster.decode[0]
        worker.script, worker.status.max_running = hanging(), 1
        await until(lambda: cluster.service.pool.decode[worker.target].load().max_running == 1)

        async def begun() -> tuple[openai.AsyncStream, str]:
            stream = await client.responses.create(model=MODEL, input="hi", stream=True)
            created, in_progress = await anext(stream), await anext(stream)
            assert (created.type, in_progress.type) == ("response.created", "response.in_progress")
            assert (created.response.output, created.response.status) == ([], "in_progress")
            return stream, created.response.id

        computing, first = await begun()
        await until(lambda: len(worker.requests) == 1)
        waiting, second = await begun()
        assert len(worker.requests) == 1 and not worker.cancelled.is_set()
        for stream, response_id in ((waiting, second), (computing, first)):
            assert not worker.cancelled.is_set()
            assert (await client.responses.cancel(response_id)).status == "cancelled"
            error, failed = [event async for event in stream]
            assert (error.type, error.sequence_number) == ("error", 2) and "cancelled" in error.message
            assert (failed.type, failed.sequence_number) == ("response.failed", 3)
            assert (await client.responses.retrieve(response_id)).status == "cancelled"
        await asyncio.wait_for(worker.cancelled.wait(), 10)
        worker.script = write_output
        again = await client.responses.create(model=MODEL, input="hi", stream=True)
        kinds = [event.type async for event in again]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert kinds.count("response.created") == 1


async def test_a_whole_response_that_fails_is_kept_as_failed(client: openai.AsyncOpenAI, cluster: Cluster):
    cluster.decode[0].script = failing(KvrailError("out of order"))
    with pytest.raises(openai.InternalServerError) as caught:
        await client.responses.create(model=MODEL, input="hi")
    kept = await client.responses.retrieve(f"resp_{caught.value.response.headers['x-request-id']}")
    assert (kept.status, kept.error.message) == ("failed", "out of order")
    with pytest.raises(openai.BadRequestError, match="failed"):
        await client.responses.cancel(kept.id)


async def test_nothing_but_its_json_is_kept_of_a_response_that_has_ended(client: openai.AsyncOpenAI, cluster: Cluster):
    def answers() -> list[Answer]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Answer]

    before = answers()  # what other tests' tracebacks hold; kept, so that no new answer gets an old one's id
    kept = [await client.responses.create(model=MODEL, input="hi") for _ in range(3)]
    await until(lambda: {id(each) for each in answers()} <= {id(each) for each in before})
    assert (await client.responses.retrieve(kept[0].id)).output_text == OUTPUT


async def test_a_client_that_leaves(client: openai.AsyncOpenAI, cluster: Cluster):
    cluster.decode[0].script = hanging(after=1)
    stream = await client.responses.create(model=MODEL, input="hi", stream=True)
    response_id = (await anext(stream)).response.id
    await stream.close()
    await asyncio.wait_for(cluster.decode[0].cancelled.wait(), 10)

    async def ended() -> bool:
        return (await client.responses.retrieve(response_id)).status == "cancelled"

    await until(ended)


async def test_tools(tokenizer: Tokenizer):
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}
    written = 'I look.\n<tool_call>\n{"name": "look_up", "arguments": {"a": "b"}}\n</tool_call>'
    async with (
        roomy(tokenizer) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        cluster.decode[0].script = saying(written)
        asked = {"model": MODEL, "tools": [tool]}
        first = await client.responses.create(**asked, input="hi")
        assert [item.type for item in first.output] == ["message", "function_call"]
        call = first.output[1]
        assert (first.output_text, call.name, json.loads(call.arguments)) == ("I look.", "look_up", {"a": "b"})
        events = [event async for event in await client.responses.create(**asked, input="hi", stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = list(dict.fromkeys(event.type for event in events))
        at = kinds.index("response.function_call_arguments.delta")
        assert kinds[at : at + 2] == [
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
        ]
        parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(parts) == call.arguments
        told = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
        second = await client.responses.create(**asked, input=[told], previous_response_id=first.id)
        prompt = prompt_of(cluster, tokenizer)
        assert "I look." in prompt
        assert prompt.index("look_up") < prompt.index("found")
        listed = await client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in listed.data] == ["message", "message", "function_call", "function_call_output"]
        await client.responses.create(**asked, input="hi", tool_choice={"type": "function", "name": "look_up"})
        assert cluster.decode[0].requests[-1].sampling.grammar


async def test_structured_text(tokenizer: Tokenizer):
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    async with (
        roomy(tokenizer) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        cluster.decode[0].script = matching
        answer = await client.responses.create(model=MODEL, input="hi", text={"format": form})
        assert json.loads(answer.output_text) == {"a": "b"}
        assert answer.text.format.schema_ == schema
        with pytest.raises(openai.BadRequestError) as caught:
            wrong = {**form, "schema": {"type": "nothing"}}
            await client.responses.create(model=MODEL, input="hi", text={"format": wrong})
        assert caught.value.param.startswith("text.format.")


REFUSED = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
    ({"input": [{"role": "user", "content": "forbidden"}]}, "input"),
    ({"input": "hi", "background": True}, "background"),
    ({"input": "hi", "conversation": "c"}, "conversation"),
    ({"input": "hi", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"input": "hi", "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"input": "hi", "include": ["file_search_call.results"]}, "include.0"),
    ({"input": "hi", "top_logprobs": 2}, "top_logprobs"),
    ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "hi", "max_output_tokens": 100_000}, "input"),
    ({"input": "hi", "text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"input": "hi", "messages": []}, "messages"),
    ({"input": "hi", "n": 2}, "n"),
    ({"input": "hi", "temperature": 3}, "temperature"),
    ({"input": "hi", "metadata": {"a": 1}}, "metadata.a"),
    ({"input": "hi", "prompt_logprobs": 0}, "prompt_logprobs"),
]


async def test_refusals_name_the_parameter(cluster: Cluster):
    for fields, param in REFUSED:
        answer = await cluster.http.post("/v1/responses", json={"model": MODEL, **fields})
        assert answer.status_code == 400, (fields, answer.text)
        check_error(answer, 400, param, answer.json()["error"]["code"])
    error_of(await cluster.http.post("/v1/responses", json={"model": "x", "input": "hi"}), 404, "model_not_found")
    error_of(await cluster.http.get("/v1/responses/none/input_items?limit=0"), 400, None)
    assert cluster.decode[0].requests == []
    assert json.loads((await cluster.http.get("/v1/responses/none")).text)["error"]["code"] == "not_found"
