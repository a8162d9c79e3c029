"""What is refused, with which status, in OpenAI's error shape and naming the parameter."""

import gzip
import random
from typing import Any

import httpx
import openai
import pytest

from kvrail.services.router.schema import ChatRequest, CompletionRequest
from kvrail.text import Tokenizer
from tests.router.cluster import CONTEXT, MODEL, Cluster, run_cluster

TEXT = [{"role": "user", "content": "hi"}]
DEEP: dict[str, Any] = {}
for _ in range(60):
    DEEP = {"items": DEEP}


def named_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def tool(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": kind, **more}}}


PATTERNED = {"properties": {"a": {}}, "patternProperties": {"^x": {}}}


NOW = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"seed": 1 << 64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty"),
    ({"repetition_penalty": 1e39}, "repetition_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": named_schema({"type": "strin"})}, "response_format.json_schema.schema.type"),
    (
        {"response_format": named_schema({"properties": {"a": {"uniqueItems": True}}})},
        "response_format.json_schema.schema.properties.a.uniqueItems",
    ),
    ({"response_format": named_schema({"$ref": "#/$defs/x"})}, "response_format.json_schema.schema.$ref"),
    (
        {"response_format": named_schema({"type": "object", "minProperties": 2})},
        "response_format.json_schema.schema.minProperties",
    ),
    ({"response_format": named_schema(DEEP)}, "response_format.json_schema.schema"),
    ({"response_format": named_schema({"enum": ["x" * 300_000]})}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar"),
    ({"bad_words": ["x"], "ignore_eos": True}, "bad_words"),
    ({"bad_words": ["x"], "response_format": {"type": "json_object"}}, "bad_words"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag.format"),
    ({"grammar": "start: ("}, "grammar"),
    ({"grammar": "start: missing"}, "grammar"),
    ({"json_schema": 5}, "json_schema"),
    ({"response_format": "text"}, "response_format"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"kvrail": {"codec": "unheard-of"}}, "kvrail.codec"),
    ({"kvrail": {"codec": 1}}, "kvrail.codec"),
    ({"kvrail": 1}, "kvrail"),
    ({"logit_bias": dict.fromkeys(map(str, range(60_000)), "x")}, "logit_bias"),
    ({"stop": [5] * 100_000}, "stop"),
    ({"stop_token_ids": [-1] * 100_000}, "stop_token_ids"),
    ({"response_format": dict.fromkeys(map(str, range(300)), 1)}, "response_format"),
    (dict.fromkeys(map(str, range(300)), 1), None),
    ({"user": "a" * 2000}, "user"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "ghost", "content": "x"}, *TEXT]}, "messages.0.role"),
    ({"messages": [*TEXT, {"role": "user"}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "forbidden"}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [NOW, NOW]}, "tools.1.function.name"),
    ({"tools": [NOW] * 129}, "tools"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": [tool("strin")], "tool_choice": "required"}, "tools.0.function.parameters.type"),
    (
        {"tools": [tool("object", **PATTERNED)], "tool_choice": "required"},
        "tools.0.function.parameters.patternProperties",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"echo": True}, "echo"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"chat_template": "x"}, "chat_template"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [1] * 400_000}, "messages"),
    ({"messages": [1] * 4000}, "messages.0"),
    ({"messages": [{"role": "user", "content": [1] * 2000}]}, "messages.0.content"),
    ({"tools": [1] * 2000}, "tools"),
]
TOO_LONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [7] * 400_000}, "prompt"),
    ({"prompt": "x" * 400_000}, "prompt"),
    ({"messages": [{"role": "user", "content": "x" * 400_000}]}, "messages"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1, 2], [3, -4]]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": ["a"] * 400_000}, "prompt"),
    ({"prompt": [[-1] * 400_000]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 20, "n": 128, "prompt": [7] * 50}, "logprobs"),
    ({"prompt_logprobs": 20, "n": 128, "prompt": [7] * 50}, "prompt_logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
]


def check_error(answer: httpx.Response, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]
    return error


async def test_bad_parameters(cluster: Cluster):
    chat = [("chat", fields, param) for fields, param in [*BOTH, *CHAT, *TOO_LONG[2:]]]
    completion = [("complete", fields, param) for fields, param in [*BOTH, *COMPLETION, *TOO_LONG[:2]]]
    for api, fields, param in [*chat, *completion]:
        answer = await getattr(cluster, api)(**fields)
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["param"] == param, (fields, answer.text)
        assert len(answer.text) < 1000  # it tells of the first error, and quotes little
        check_error(answer, 400, param, "context_length_exceeded" if (fields, param) in TOO_LONG else None)
    assert cluster.decode[0].requests == []
    assert await cluster.metric('kvrail_requests_in_flight{state="waiting"}') == 0


async def test_what_asks_for_nothing_is_taken(cluster: Cluster):
    both = {
        "bad_words": [],
        "use_beam_search": False,
        "length_penalty": 1.0,
        "prompt_logprobs": None,
        "a_new_field": [1],
    }
    chat = {"echo": False, "store": True, "verbosity": "low", "metadata": {"a": "b"}, "service_tier": "auto"}
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    for answer in (await cluster.chat(**both, **chat, **tools), await cluster.complete(**both)):
        assert answer.status_code == 200, answer.text


async def test_all_bad_keys_are_named(cluster: Cluster):
    for keys in (("a", "b", "-1"), ("300", "4000000000")):
        answer = await cluster.chat(logit_bias={"5": 1, **dict.fromkeys(keys, 1)})
        message = check_error(answer, 400, "logit_bias", None)["message"]
        assert all(repr(key) in message for key in keys)
    wide = {str(i): 0.5 for i in range(300)}
    assert (await cluster.chat(logit_bias=wide)).status_code == 200
    assert len(cluster.decode[0].requests[0].sampling.logit_bias) == 300


async def test_missing_field(cluster: Cluster):
    for path, param in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        check_error(await cluster.http.post(path, json={"model": MODEL}), 400, param, None)


FRAGMENTS = [
    None,
    True,
    -1,
    0,
    1,
    299,
    1 << 40,
    10**40,
    1.5,
    1e308,
    "",
    "x",
    "\0",
    "é" * 3,
    [],
    [0],
    [[]],
    ["x", 1],
    {},
]
FIELDS = [*ChatRequest.model_fields, *CompletionRequest.model_fields, "unknown"]


def random_value(draw: random.Random, depth: int = 0) -> Any:
    if depth < 2 and draw.random() < 0.3:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(3))]
    if depth < 2 and draw.random() < 0.3:
        keys = ["role", "content", "type", "text", "5", "codec", "include_usage"]
        return {draw.choice(keys): random_value(draw, depth + 1) for _ in range(draw.randrange(3))}
    return draw.choice([*FRAGMENTS, "user", "text"])


async def test_no_body_breaks_the_server(cluster: Cluster):
    draw = random.Random(1)
    for _ in range(400):
        fields = {draw.choice(FIELDS): random_value(draw) for _ in range(draw.randrange(1, 3))}
        answer = await (cluster.chat if draw.random() < 0.5 else cluster.complete)(**fields)
        assert answer.status_code in (200, 400, 404), (fields, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"], (fields, answer.text)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "x", "temperature": NaN}',
        b"[" * 100_000,
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "torn", "list", "null", "string", "not-utf8", "nan", "deep", "digits"],
)
async def test_bad_bodies(cluster: Cluster, body: bytes):
    headers = {"content-type": "application/json"}
    answer = await cluster.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"NaN", 400),
        (b"-Infinity", 400),
        (b"1e999", 400),
        (b"9" * 5000, 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 60_000 + b"1" + b"}" * 60_000, 400),
        (b'{"a":' * 70_000 + b"1" + b"}" * 70_000, 413),
        (b"[" + b"1," * (1 << 20) + b"1]", 413),
        (b"[" + b"[]," * (1 << 18) + b"[]]", 413),
        (b'"\xff"', 400),
    ],
)
async def test_what_json_cannot_say_or_says_at_too_great_length(cluster: Cluster, value: bytes, status: int):
    body = b'{"prompt": "x", "min_p": %b}' % value
    answer = await cluster.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    check_error(answer, status, answer.json()["error"]["param"], "request_too_large" if status == 413 else None)
    assert cluster.decode[0].requests == []


async def test_half_a_surrogate_pair(cluster: Cluster):
    for path, body in (
        ("/v1/completions", rb'{"prompt": "\ud800"}'),
        ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}'),
    ):
        answer = await cluster.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "surrogate" in answer.json()["error"]["message"]


async def test_other_content_types(cluster: Cluster):
    answer = await cluster.http.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


async def test_encoded_bodies(cluster: Cluster):
    body = gzip.compress(b'{"prompt": "x"}')
    for path in ("/v1/completions", "/v1/messages"):
        for coding in ("gzip", "deflate", "identity, gzip", "x" * 500):
            answer = await cluster.http.post(path, content=body, headers={"content-encoding": coding})
            assert answer.status_code == 415
            assert answer.headers["accept-encoding"] == "identity"  # as RFC 9110, section 15.5.16, asks
            assert answer.json()["error"]["message"].startswith(f"Content-Encoding: '{coding[:80]}' is not supported")
    body = {"model": MODEL, "prompt": "x"}
    assert (await cluster.http.post("/v1/completions", json=body, headers={"content-encoding": "Identity"})).is_success


async def test_wrong_model(client: openai.AsyncOpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="other", messages=TEXT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_context_overflow(client: openai.AsyncOpenAI, cluster: Cluster):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=TEXT, max_tokens=CONTEXT)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert str(CONTEXT) in caught.value.message
    fits, too_long = (
        await cluster.complete(prompt=[7] * 500, max_tokens=12),
        await cluster.complete(prompt=[7] * 500, max_tokens=13),
    )
    assert fits.status_code == 200
    check_error(too_long, 400, "prompt", "context_length_exceeded")
    check_error(await cluster.complete(prompt=[7] * CONTEXT, max_tokens=None), 400, "prompt", "context_length_exceeded")


async def test_unknown_paths_and_methods(cluster: Cluster):
    check_error(await cluster.http.get("/v1/nothing"), 404, None, "not_found")
    answer = await cluster.http.get("/v1/chat/completions")
    check_error(answer, 405, None, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_api_keys(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["first", "sécond"]) as cluster:
        missing = await cluster.complete()
        check_error(missing, 401, None, "invalid_api_key")
        assert missing.headers["www-authenticate"] == "Bearer"
        for value in ("Bearer wrong", "Bearer", "first", "Basic first", "Bearer firs", "Bearer first2"):
            answer = await cluster.http.get("/v1/models", headers={"authorization": value})
            check_error(answer, 401, None, "invalid_api_key")
        for key in ("first", "sécond"):
            header = f"Bearer {key}".encode()
            answer = await cluster.http.post(
                "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={b"authorization": header}
            )
            assert answer.status_code == 200
        for path in ("/health", "/version", "/metrics", "/metrics/vllm"):
            assert (await cluster.http.get(path)).status_code == 200
        for path in ("/tokenize", "/v1/nothing"):
            check_error(await cluster.http.post(path, json={"prompt": "x"}), 401, None, "invalid_api_key")
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="bad", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_body_limit(tokenizer: Tokenizer):
    async def chunks():
        for _ in range(40):
            yield b"x" * 100

    async with run_cluster(tokenizer, max_body_bytes=1000) as cluster:
        assert (await cluster.complete(prompt="x" * 500)).status_code == 400  # over the context, within the limit
        check_error(await cluster.complete(prompt="x" * 1000), 413, None, "request_too_large")
        check_error(await cluster.http.post("/v1/completions", content=chunks()), 413, None, "request_too_large")
        for length in (5_000, 60_000):
            huge = await cluster.http.post("/v1/completions", content=b"x" * length)
            check_error(huge, 413, None, "request_too_large")
        asked_first = await cluster.http.post(
            "/v1/completions", content=b"x" * 5000, headers={"expect": "100-continue"}
        )
        check_error(asked_first, 413, None, "request_too_large")
        assert (await cluster.complete()).status_code == 200
