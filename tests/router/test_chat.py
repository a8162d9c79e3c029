"""Chat completions as the official client sees them."""

import json

import httpx
import openai

from kvrail.text import Tokenizer
from tests.chats import chat_ids
from tests.router.cluster import CONTEXT, MODEL, OUTPUT, Cluster

HI = [{"role": "user", "content": "hi"}]


async def test_answer_and_what_the_worker_was_asked(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer):
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=HI,
        max_completion_tokens=50,
        temperature=0.25,
        top_p=0.5,
        seed=7,
        stop=["x", "yy"],
        logit_bias={"5": -3.5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.25,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "kvrail": {"codec": "splitzip"},
            "an_unknown_field": 1,
        },
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "fp_" + "f" * 12
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == OUTPUT
    assert answer.choices[0].finish_reason == "stop"

    asked = cluster.decode[0].requests[0]
    prompt = chat_ids(tokenizer, HI)
    assert list(asked.prompt_token_ids) == prompt
    assert asked.request_id == answer.id.removeprefix("chatcmpl-")
    assert asked.model == MODEL
    assert asked.codec == "splitzip"
    assert list(asked.prefill_workers) == list(cluster.service.pool.prefill)
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (50, 0.25, 0.5, 7)
    assert list(sampling.stop) == ["x", "yy"]
    assert dict(sampling.logit_bias) == {5: -3.5}
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (3, 0.1, 1.25, 2)
    assert list(sampling.stop_token_ids) == [9]
    assert sampling.ignore_eos
    assert sampling.include_stop_in_output
    assert not sampling.skip_special_tokens
    assert sampling.n == 1
    assert not sampling.HasField("logprobs")

    usage = answer.usage
    generated = len(tokenizer.encode(OUTPUT, add_special_tokens=False))
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), generated)
    assert usage.total_tokens == len(prompt) + generated
    assert usage.prompt_tokens_details.cached_tokens == 3
    extension = usage.model_extra["kvrail"]
    assert (extension["prefill_worker"], extension["codec"]) == ("p:1", "raw")
    assert (extension["kv_bytes"], extension["kv_raw_bytes"]) == (1000, 1500)
    assert extension["stage_seconds"]["prefill"] == 0.001


async def test_defaults(cluster: Cluster, tokenizer: Tokenizer):
    assert (await cluster.chat(top_k=-1, seed=-1)).status_code == 200
    await cluster.chat()
    first, second = (request.sampling for request in cluster.decode[0].requests)
    assert first.max_tokens == CONTEXT - len(chat_ids(tokenizer, HI))
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert first.skip_special_tokens
    assert first.seed == (1 << 64) - 1
    assert second.seed not in (0, first.seed)  # drawn


async def test_messages_reach_the_template(cluster: Cluster, tokenizer: Tokenizer):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    await cluster.chat(messages=messages, add_generation_prompt=False, chat_template_kwargs={"shout": True})
    expected = "<|system|>be brief<|end|><|user|>a\nb<|end|>!"
    assert list(cluster.decode[0].requests[0].prompt_token_ids) == tokenizer.encode(expected, add_special_tokens=False)


async def test_other_roles_and_efforts_are_the_templates(cluster: Cluster, tokenizer: Tokenizer):
    messages = [{"role": "critic", "content": "too long"}, *HI]
    assert (await cluster.chat(messages=messages, reasoning_effort="low")).status_code == 200
    expected = "<|critic|>too long<|end|><|user|>hi<|end|><|assistant|>low"
    assert list(cluster.decode[0].requests[0].prompt_token_ids) == tokenizer.encode(expected, add_special_tokens=False)


async def test_token_ids(cluster: Cluster, tokenizer: Tokenizer):
    generated = tokenizer.encode(OUTPUT, add_special_tokens=False)
    answer = (await cluster.chat(return_token_ids=True, logprobs=True, return_tokens_as_token_ids=True)).json()
    assert answer["prompt_token_ids"] == chat_ids(tokenizer, HI)
    assert answer["choices"][0]["token_ids"] == generated
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == [
        f"token_id:{token_id}" for token_id in generated
    ]
    lines = (await cluster.chat(return_token_ids=True, stream=True)).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [i for chunk in chunks[1:] for i in chunk["choices"][0]["token_ids"]] == generated
    assert (await cluster.chat()).json()["choices"][0]["token_ids"] is None
    whole = (await cluster.complete(prompt=["hi", "hello"], return_token_ids=True)).json()["choices"]
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in ("hi", "hello")]
    assert [choice["prompt_token_ids"] for choice in whole] == prompts
    assert [choice["token_ids"] for choice in whole] == [generated] * 2


async def test_continue_final_message(cluster: Cluster, tokenizer: Tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
    assert (await cluster.chat(messages=messages, continue_final_message=True)).status_code == 200
    expected = "<|user|>hi<|end|><|assistant|>Hel"
    assert list(cluster.decode[0].requests[0].prompt_token_ids) == tokenizer.encode(expected, add_special_tokens=False)


async def test_stream_with_usage(client: openai.AsyncOpenAI, tokenizer: Tokenizer):
    stream = await client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == OUTPUT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(tokenizer.encode(OUTPUT, add_special_tokens=False))
    assert chunks[-1].usage.model_extra["kvrail"]["codec"] == "raw"


async def test_stream_on_the_wire(cluster: Cluster):
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    answer = await cluster.chat(stream=True, stream_options=wanted)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[:-1] == list(range(len(chunks) - 1))
    assert counts[-1] == counts[-2]
    without = await cluster.chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert '"usage"' not in without.text


async def test_text_that_is_held_back_makes_no_chunk(cluster: Cluster, tokenizer: Tokenizer):
    async def hold(worker, request):
        from kvrail.wire.v1 import decode_pb2
        from tests.router.cluster import summary

        yield decode_pb2.GenerateReply(token_ids=[10])
        yield decode_pb2.GenerateReply(token_ids=[11], text="ab", finish_reason=1, stop_reason="c")
        yield decode_pb2.GenerateReply(summary=summary(1, 2))

    cluster.decode[0].script = hold
    events = (await cluster.chat(stream=True, stop="c")).text.split("\n\n")[:-2]
    assert len(events) == 2  # the role, and one with text and end
    choice = json.loads(events[1].removeprefix("data: "))["choices"][0]
    assert (choice["delta"], choice["finish_reason"], choice["stop_reason"]) == ({"content": "ab"}, "stop", "c")


async def test_n_choices(client: openai.AsyncOpenAI, tokenizer: Tokenizer):
    answer = await client.chat.completions.create(model=MODEL, messages=HI, n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    expected = "".join(tokenizer.token_text(i) for i in tokenizer.encode(OUTPUT, add_special_tokens=False)[:2])
    assert [choice.message.content for choice in answer.choices] == [expected] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.usage.completion_tokens == 4
    stream = await client.chat.completions.create(model=MODEL, messages=HI, n=2, max_tokens=2, stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: expected, 1: expected}


async def test_logprobs(client: openai.AsyncOpenAI, tokenizer: Tokenizer):
    answer = await client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=3, max_tokens=3)
    ids = tokenizer.encode(OUTPUT, add_special_tokens=False)[:3]
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [tokenizer.token_text(i) for i in ids]
    assert [bytes(entry.bytes) for entry in content] == [tokenizer.token_bytes(i) for i in ids]
    assert [entry.logprob for entry in content] == [-0.5] * 3
    top = content[0].top_logprobs
    assert [entry.logprob for entry in top] == [-0.5, -2.0, -9999.0]  # JSON knows no minus infinity
    assert top[1].token == tokenizer.token_text((ids[0] + 1) % 280)
    stream = await client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, max_tokens=3, stream=True)
    entries = [entry async for chunk in stream for entry in (chunk.choices[0].logprobs or HI_NONE).content or []]
    assert [entry.token for entry in entries] == [entry.token for entry in content]
    assert entries[0].top_logprobs == []


class HI_NONE:
    content = None


async def test_request_ids(cluster: Cluster):
    body = {"model": MODEL, "messages": HI}
    answer = await cluster.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "chatcmpl-mine-1"
    assert cluster.decode[0].requests[0].request_id.startswith("mine-1-")
    for bad in ("a" * 65, "a b", "ü".encode().decode("latin-1")):
        answer = await cluster.http.post(
            "/v1/chat/completions", json=body, headers={b"X-Request-Id": bad.encode("latin-1")}
        )
        assert answer.headers["x-request-id"] == answer.json()["id"].removeprefix("chatcmpl-")
        assert len(answer.headers["x-request-id"]) == 32


async def test_deadline_travels(cluster: Cluster):
    await cluster.chat()
    assert 590 < cluster.decode[0].deadlines[0] <= 600


async def test_many_at_once(cluster: Cluster):
    import asyncio

    answers: list[httpx.Response] = await asyncio.gather(*(cluster.chat(max_tokens=3) for _ in range(30)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 30
