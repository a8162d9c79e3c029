"""Names, defaults and keys that clients of OpenAI's, vLLM's and llama.cpp's servers rely on."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from kvrail.grammar import Grammars
from kvrail.text import Tokenizer
from kvrail.wire.v1 import common_pb2, decode_pb2
from tests.chats import chat_ids
from tests.router.cluster import CONTEXT, MODEL, OUTPUT, Cluster, run_cluster, summary, until
from tests.router.scripts import error_of, hanging
from tests.router.writing import saying

HI = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 5}),
]


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


async def test_the_model_need_not_be_named(cluster: Cluster):
    for path, body in BODIES:
        for named in ({}, {"model": ""}, {"model": None}):
            answer = await cluster.http.post(path, json={**body, **named})
            assert (answer.status_code, answer.json().get("model")) == (200, MODEL), (path, named, answer.text)
        stream = await cluster.http.post(path, json={**body, "stream": True})
        assert f'"model":"{MODEL}"' in stream.text, path
    counted = await cluster.http.post("/v1/messages/count_tokens", json={"messages": HI})
    assert counted.json()["input_tokens"] > 0


async def test_paths_without_a_version(cluster: Cluster):
    async with openai.AsyncOpenAI(base_url=cluster.url, api_key="x", max_retries=0) as client:
        assert (await client.chat.completions.create(model=MODEL, messages=HI)).choices[0].message.content == OUTPUT
        assert (await client.completions.create(model=MODEL, prompt="hi")).choices[0].text == OUTPUT
        assert (await client.responses.create(model=MODEL, input="hi")).output_text == OUTPUT
        assert [each.id for each in (await client.models.list()).data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
    error_of(await cluster.http.post("/chat/completions", json={}), 400, None)


async def test_paths_without_a_version_need_a_key(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["k"]) as cluster:
        for path in ("/chat/completions", "/completions", "/responses", "/models"):
            assert (await cluster.http.post(path, json={})).status_code == 401
        for path in ("/ping", "/load"):
            assert (await cluster.http.get(path)).status_code == 200


async def test_ping_and_load(cluster: Cluster):
    for method in ("GET", "POST"):
        assert (await cluster.http.request(method, "/ping")).status_code == 200
    assert (await cluster.http.get("/load")).json() == {"server_load": 0}
    cluster.decode[0].script = hanging()
    asked = asyncio.create_task(cluster.chat(n=2))
    await until(lambda: bool(cluster.decode[0].requests))
    assert (await cluster.http.get("/load")).json() == {"server_load": 2}
    asked.cancel()


async def test_keys_without_a_value_are_null(cluster: Cluster):
    answer = (await cluster.chat()).json()
    message = answer["choices"][0]["message"]
    assert ChatCompletionMessage.model_fields.keys() - {"function_call"} <= message.keys()  # OpenAI's is no null
    assert [message[key] for key in ("refusal", "audio", "reasoning", "reasoning_content")] == [None] * 4
    assert message["tool_calls"] == []
    assert [answer[key] for key in ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params")] == [None] * 3
    assert answer["service_tier"] == "default"
    assert [answer["choices"][0][key] for key in ("logprobs", "stop_reason", "token_ids")] == [None] * 3
    again = await cluster.chat(messages=[*HI, message, *HI])
    assert again.status_code == 200, again.text
    found = (await cluster.complete()).json()
    assert (found["service_tier"], found["kv_transfer_params"]) == ("default", None)
    keys = ("logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
    assert [found["choices"][0][key] for key in keys] == [None] * 5


async def unlikely(worker, request):
    """One token, the third most likely one at its place."""
    likely = [common_pb2.TopLogprob(token_id=20 + i, logprob=-1.0 - i) for i in range(request.sampling.logprobs)]
    logprobs = common_pb2.TokenLogprobs(logprob=-3.0, top=likely)
    text = worker.tokenizer.token_text(22)
    yield decode_pb2.GenerateReply(token_ids=[22], text=text, logprobs=[logprobs], finish_reason=1)
    yield decode_pb2.GenerateReply(summary=summary(len(request.prompt_token_ids), 1))


async def test_the_token_itself_comes_before_the_most_likely_ones(cluster: Cluster, tokenizer: Tokenizer):
    """As vLLM orders them; a chat has as many as were asked for, a completion one more where the token is none."""
    cluster.decode[0].script = unlikely
    text = tokenizer.token_text
    for top, expected in ((0, []), (1, [22]), (2, [22, 20]), (3, [22, 20, 21]), (4, [22, 20, 21, 23])):
        chosen = {"logprobs": True, "top_logprobs": top}
        entry = (await cluster.chat(**chosen)).json()["choices"][0]["logprobs"]["content"][0]
        assert [each["token"] for each in entry["top_logprobs"]] == [text(i) for i in expected]
        assert all(each["logprob"] == entry["logprob"] for each in entry["top_logprobs"][:1])
        last = chunks_of((await cluster.chat(**chosen, stream=True)).text)[-1]
        assert last["choices"][0]["logprobs"]["content"][0] == entry
    lists = (await cluster.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert list(lists["top_logprobs"][0].items()) == [(text(22), -3.0), (text(20), -1.0), (text(21), -2.0)]


async def test_whole_numbers_may_have_a_point(cluster: Cluster):
    for ask in (cluster.chat, cluster.complete):
        answer = await ask(max_tokens=2.0, n=1.0, top_k=3.0, seed=7.0, min_tokens=1.0)
        assert answer.status_code == 200, answer.text
        sampling = cluster.decode[0].requests[-1].sampling
        assert (sampling.max_tokens, sampling.top_k, sampling.seed, sampling.min_tokens) == (2, 3, 7, 1)
        for value in (2.5, "2", True, 1e300):
            error_of(await ask(max_tokens=value), 400, None)


async def test_an_assistants_content_may_be_null(cluster: Cluster, tokenizer: Tokenizer):
    messages = [*HI, {"role": "assistant", "content": None}, *HI]
    assert (await cluster.chat(messages=messages)).status_code == 200
    assert list(cluster.decode[0].requests[0].prompt_token_ids) == chat_ids(
        tokenizer, [*HI, {"role": "assistant", "content": ""}, *HI]
    )


async def test_prompts_are_truncated_on_request(cluster: Cluster, tokenizer: Tokenizer):
    """The last tokens are kept; -1: as many as the context has room for."""
    long = list(range(100, 250)) * 6
    for prompt, keep, kept in ((long, 5, long[-5:]), (long, -1, long[-(CONTEXT - 16) :]), (long[:3], 5, long[:3])):
        answer = await cluster.complete(prompt=prompt, truncate_prompt_tokens=keep, max_tokens=16)
        assert answer.status_code == 200, answer.text
        assert list(cluster.decode[0].requests[-1].prompt_token_ids) == kept
        assert answer.json()["usage"]["prompt_tokens"] == len(kept)
    text = [{"role": "user", "content": "x y " * 1000}]
    assert (await cluster.chat(messages=text, truncate_prompt_tokens=7)).status_code == 200
    assert list(cluster.decode[0].requests[-1].prompt_token_ids) == chat_ids(tokenizer, text)[-7:]
    assert (await cluster.complete(prompt="x y " * 1000, truncate_prompt_tokens=-1)).status_code == 200
    for wrong in ({"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": CONTEXT + 1}):
        answer = await cluster.complete(**wrong)
        assert answer.json()["error"]["param"] == "truncate_prompt_tokens", answer.text
    answer = await cluster.complete(truncate_prompt_tokens=1, echo=True)
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"
    assert (await cluster.complete(truncate_prompt_tokens=0)).json()["error"]["param"] == "prompt"


async def test_allowed_tokens(cluster: Cluster, thinking: Tokenizer, tokenizer: Tokenizer):
    """An output has no other tokens, in chats also while it reasons; it ends only where it may, or is cut off."""
    allowed = [*range(70, 75), 80, 270]
    end = next(iter(tokenizer.eos_token_ids))
    async with run_cluster(thinking) as other:
        for ask in (cluster.chat, cluster.complete, other.chat):
            where = other if ask == other.chat else cluster
            for more in ([], [end]):
                assert (await ask(allowed_token_ids=[*allowed, *more], max_tokens=5)).status_code == 200
                text = where.decode[0].requests[-1].sampling.grammar
                grammar = await Grammars(lambda where=where: where.decode[0].tokenizer).get(text, "")
                matcher = grammar.matcher()
                for written in range(3):
                    mask = int.from_bytes(matcher.state.compute_bitmask(), "little")
                    assert [i for i in range(300) if mask >> i & 1] == sorted({*allowed, *more})
                    assert matcher.move_to([70] * (written + 1)) == written + 1
    for wrong in (
        {"allowed_token_ids": []},
        {"allowed_token_ids": [300]},
        {"allowed_token_ids": [end]},
        {"allowed_token_ids": [70], "response_format": {"type": "json_object"}},
        {"allowed_token_ids": [70], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ):
        answer = await cluster.chat(**wrong)
        assert answer.json()["error"]["param"] == "allowed_token_ids", answer.text


THOUGHT = "<think>\nHm.\n</think>\n\nForty-two."


@pytest.mark.parametrize("include", [None, True, False])
async def test_reasoning_has_both_names_or_is_left_out(thinking: Tokenizer, include: bool | None):
    async with run_cluster(thinking) as cluster:
        cluster.decode[0].script = saying(THOUGHT)
        told = None if include is False else "Hm."
        message = (await cluster.chat(include_reasoning=include)).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Forty-two.", told, told)
        chunks = chunks_of((await cluster.chat(include_reasoning=include, stream=True)).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == (told or "")
        assert "".join(delta.get("content", "") for delta in deltas) == "Forty-two."


async def test_documents_reach_a_template_that_shows_them(tokenizer: Tokenizer, cluster: Cluster, tmp_path):
    from kvrail.text import load_tokenizer
    from tests.router.cluster import TEMPLATE, write_tokenizer

    documents = [{"title": "a", "text": "b"}]
    answer = await cluster.chat(documents=documents)
    assert answer.json()["error"]["param"] == "documents"  # this template would leave them out
    assert (await cluster.chat(documents=[])).status_code == 200
    write_tokenizer(tmp_path, "{% for d in documents or [] %}<{{ d.title }}>{{ d.text }}{% endfor %}" + TEMPLATE)
    showing = load_tokenizer(str(tmp_path))
    async with run_cluster(showing) as other:
        assert (await other.chat(documents=documents)).status_code == 200
        prompt = showing.decode(list(other.decode[0].requests[0].prompt_token_ids), skip_special_tokens=False)
        assert prompt.startswith("<a>b<|user|>")
        assert (await other.chat(documents=[5])).json()["error"]["param"] == "documents.0"


async def test_a_chat_template_of_the_requests_own(tokenizer: Tokenizer):
    template = "{{ eos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    async with run_cluster(tokenizer, trust_request_chat_template=True) as cluster:
        assert (await cluster.chat(chat_template=template)).status_code == 200
        prompt = tokenizer.decode(list(cluster.decode[0].requests[0].prompt_token_ids), skip_special_tokens=False)
        assert prompt == "<|end|>[hi]"
        for wrong in ("{% if %}", "x" * 70_000, 5):
            answer = await cluster.chat(chat_template=wrong)
            assert answer.json()["error"]["param"] == "chat_template", answer.text
        assert (await cluster.chat(chat_template="{{ ''.__class__.__mro__ }}")).status_code == 400


async def test_tokenizer_info(cluster: Cluster, tokenizer: Tokenizer):
    found = (await cluster.http.get("/tokenizer_info")).json()
    assert (found["tokenizer_class"], found["eos_token"]) == ("PreTrainedTokenizerFast", "<|end|>")
    assert found["chat_template"] == tokenizer.chat.source
    special = {int(i): each["content"] for i, each in found["added_tokens_decoder"].items() if each["special"]}
    assert special.keys() == tokenizer.special_ids
    assert special[tokenizer.special_id("<|user|>")] == "<|user|>"
    assert "/" not in json.dumps({key: value for key, value in found.items() if key != "chat_template"})
