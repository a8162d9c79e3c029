"""Completions, models and tokenisation."""

import json
from pathlib import Path

import openai
import tokenizers

from kvrail.text import IncrementalDetokenizer, Tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.chats import chat_ids
from tests.router.cluster import CONTEXT, MODEL, OUTPUT, Cluster, logprobs_for, summary


async def test_answer(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer):
    answer = await client.completions.create(model=MODEL, prompt="the quick", seed=1)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (OUTPUT, "stop")
    asked = cluster.decode[0].requests[0]
    assert list(asked.prompt_token_ids) == tokenizer.encode("the quick", add_special_tokens=True)
    assert asked.sampling.max_tokens == 16


async def test_null_max_tokens_is_the_rest_of_the_context(cluster: Cluster):
    assert (await cluster.complete(max_tokens=None, prompt=[5, 6, 7])).status_code == 200
    assert cluster.decode[0].requests[0].sampling.max_tokens == CONTEXT - 3


async def test_kinds_of_prompts(cluster: Cluster, tokenizer: Tokenizer):
    hello, quick = (tokenizer.encode(text, add_special_tokens=True) for text in ("hello", "quick"))
    kinds = [
        ("hello", [hello]),
        (["hello", "quick"], [hello, quick]),
        (hello, [hello]),
        ([hello, quick], [hello, quick]),
    ]
    for prompt, expected in kinds:
        cluster.decode[0].requests.clear()
        answer = (await cluster.complete(prompt=prompt, n=2)).json()
        asked = sorted(cluster.decode[0].requests, key=lambda request: request.request_id)
        assert [list(request.prompt_token_ids) for request in asked] == expected
        assert len({request.sampling.seed for request in asked}) == len(expected)
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        assert {choice["text"] for choice in answer["choices"]} == {OUTPUT}
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(min(3, len(each)) for each in expected)


async def test_echo(cluster: Cluster, tokenizer: Tokenizer):
    ids = tokenizer.encode("quick", add_special_tokens=False)
    answer = (await cluster.complete(prompt=["hello", "fox"], echo=True)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello" + OUTPUT, "fox" + OUTPUT]
    assert (await cluster.complete(prompt=ids, echo=True)).json()["choices"][0]["text"] == "quick" + OUTPUT
    events = (await cluster.complete(prompt="hello", echo=True, stream=True)).text.split("\n\n")[:-2]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert texts[0] == "hello"
    assert "".join(texts) == "hello" + OUTPUT


async def test_stream_of_several_prompts(client: openai.AsyncOpenAI):
    stream = await client.completions.create(model=MODEL, prompt=["a", "b", "c"], stream=True, n=2)
    texts: dict[int, str] = {}
    ends = {}
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        ends[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(6), OUTPUT)
    assert ends == dict.fromkeys(range(6), "stop")


async def test_logprobs(client: openai.AsyncOpenAI, tokenizer: Tokenizer):
    answer = await client.completions.create(model=MODEL, prompt="x", logprobs=2, max_tokens=3)
    found = answer.choices[0].logprobs
    tokens = [tokenizer.token_text(i) for i in tokenizer.encode(OUTPUT, add_special_tokens=False)[:3]]
    assert found.tokens == tokens
    assert found.token_logprobs == [-0.5] * 3
    assert found.text_offset == [0, len(tokens[0]), len(tokens[0]) + len(tokens[1])]
    assert [top[token] for top, token in zip(found.top_logprobs, tokens, strict=True)] == [-0.5] * 3
    assert {len(top) for top in found.top_logprobs} == {2}
    as_ids = {"return_tokens_as_token_ids": True}
    shown = await client.completions.create(model=MODEL, prompt="x", logprobs=2, max_tokens=3, extra_body=as_ids)
    assert shown.choices[0].logprobs.tokens[0].startswith("token_id:")
    assert shown.choices[0].logprobs.text_offset == found.text_offset
    stream = await client.completions.create(model=MODEL, prompt="x", logprobs=0, max_tokens=3, stream=True)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    assert [part.text_offset[0] for part in parts] == found.text_offset
    assert [part.top_logprobs[0] for part in parts] == [{token: -0.5} for token in tokens]


async def test_text_offsets_are_those_of_the_text(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer):
    """Tokens of one character begin where it does; one that the text leaves out takes no room."""
    written = "é€😀 yes é"
    ids = tokenizer.encode(written, add_special_tokens=False)
    (end,) = tokenizer.encode("<|end|>", add_special_tokens=False)

    async def script(worker, request):
        reader = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, True)
        for token_id in (*ids, end, *ids):
            text, logprobs = reader.push((token_id,)), [logprobs_for(token_id, 0)]
            yield decode_pb2.GenerateReply(token_ids=[token_id], text=text, logprobs=logprobs)
        yield decode_pb2.GenerateReply(token_ids=[end], logprobs=logprobs, finish_reason=decode_pb2.FINISH_REASON_STOP)
        yield decode_pb2.GenerateReply(summary=summary(1, 2 * len(ids) + 2))

    cluster.decode[0].script = script
    choice = (await client.completions.create(model=MODEL, prompt="x", logprobs=0, max_tokens=99)).choices[0]
    assert choice.text == written + written
    offsets = [len(tokenizer.decode(ids[:count], False).rstrip("\ufffd")) for count in range(len(ids))]
    again = [len(written) + offset for offset in offsets]
    assert choice.logprobs.text_offset == [*offsets, len(written), *again, 2 * len(written)]


async def test_models(client: openai.AsyncOpenAI, cluster: Cluster):
    listed = [model async for model in client.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in listed] == [(MODEL, "model", "kvrail")]
    one = await client.models.retrieve(MODEL)
    assert one.model_extra["max_model_len"] == CONTEXT
    missing = await cluster.http.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_back(cluster: Cluster, tokenizer: Tokenizer, model_folder: Path):
    answer = (await cluster.http.post("/tokenize", json={"prompt": "hello fox", "return_token_strs": True})).json()
    ids = tokenizer.encode("hello fox", add_special_tokens=True)
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), CONTEXT)
    backend = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert answer["token_strs"] == backend.encode("hello fox").tokens  # such as Ġ, of which the text is a space
    back = await cluster.http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": "hello fox"}
    chat = await cluster.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["tokens"] == chat_ids(tokenizer, [{"role": "user", "content": "hi"}])
    tool = {"type": "function", "function": {"name": "now"}}
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    listed = await cluster.http.post("/tokenize", json=asked)
    assert (await cluster.chat(**asked, return_token_ids=True)).json()["prompt_token_ids"] == listed.json()["tokens"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [tool]}, "tools"),
        ("/tokenize", asked | {"tools": [tool, tool]}, "tools.1.function.name"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
    ):
        refused = await cluster.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_version(cluster: Cluster):
    from kvrail import __version__

    assert (await cluster.http.get("/version")).json() == {"version": __version__}
