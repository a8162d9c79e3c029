"""Structured output through the official client: what is asked reaches the worker, and what comes back is valid."""

import json
import re

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from kvrail.grammar import texts
from kvrail.values.sampling import MAX_GRAMMAR_BYTES
from tests.router.cluster import MODEL, Cluster, run_cluster
from tests.router.test_responses import prompt_of
from tests.router.writing import LENGTH, matching, saying

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, SCHEMA),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
    ({"json_schema": SCHEMA}, SCHEMA),
    ({"structured_outputs": {"choice": ["red", 'gr"een', "naïve"]}}, {"red", 'gr"een', "naïve"}),
    ({"structured_outputs": {"regex": "[a-c]{2}/[0-9]+x"}}, re.compile("[a-c]{2}/[0-9]+x")),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, re.compile("a[0-9]b")),
    ({"grammar": 'start: "x" /[0-9]/ "y"'}, re.compile("x[0-9]y")),
]


class Inner(BaseModel):
    kind: str | None
    values: list[int]


class Outer(BaseModel):
    title: str
    inner: Inner
    flag: bool


def check(text: str, form: object) -> None:
    if isinstance(form, dict):
        jsonschema.validate(json.loads(text), form)
    elif isinstance(form, set):
        assert text in form
    else:
        assert form.fullmatch(text)


@pytest.mark.parametrize(
    ("fields", "form"), FORMS, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
async def test_every_spelling_reaches_the_worker(cluster: Cluster, fields, form):
    cluster.decode[0].script = matching
    for api in ("chat", "complete"):
        for seed in range(3):
            answer = await getattr(cluster, api)(**fields, seed=seed, max_tokens=300)
            (choice,) = answer.json()["choices"]
            if choice["finish_reason"] == "stop":
                check(choice["message"]["content"] if api == "chat" else choice["text"], form)


async def test_json_mode_gives_an_object(cluster: Cluster, client: openai.AsyncOpenAI):
    cluster.decode[0].script = matching
    asked = {"model": MODEL, "messages": MESSAGES, "response_format": {"type": "json_object"}, "n": 4, "seed": 1}
    answer = await client.chat.completions.create(**asked, max_tokens=200)
    for choice in answer.choices:
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    assert any(choice.finish_reason == "stop" for choice in answer.choices)


async def test_parse_gives_an_object_of_the_class_that_was_asked_for(cluster: Cluster, client: openai.AsyncOpenAI):
    cluster.decode[0].script = matching
    parsed = 0
    for seed in range(6):
        try:
            answer = await client.chat.completions.parse(
                model=MODEL, messages=MESSAGES, response_format=Outer, seed=seed, max_tokens=400
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, Outer)
        parsed += 1
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, response_format=Outer, seed=seed, max_tokens=400
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    assert parsed >= 3


async def test_text_and_absent_formats_constrain_nothing(cluster: Cluster):
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}, {"grammar": ""}):
        assert (await cluster.chat(**fields)).status_code == 200
        assert cluster.decode[0].requests[-1].sampling.grammar == ""


async def test_keywords_that_cannot_be_enforced_are_refused_where_strict(cluster: Cluster):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    described = {"name": "x", "schema": schema}
    assert (await cluster.chat(response_format={"type": "json_schema", "json_schema": described})).status_code == 200
    strict = {"type": "json_schema", "json_schema": {**described, "strict": True}}
    answer = await cluster.chat(response_format=strict)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema.uniqueItems"


async def test_a_grammar_that_ends_its_compiler_is_a_400_and_the_router_goes_on(cluster: Cluster):
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(8000))
    answer = await cluster.complete(grammar=f'start: r0\n{rules}\nr8000: "a"')
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "grammar" and "nested too deeply" in answer.json()["error"]["message"]
    assert (await cluster.complete(grammar='start: "a"')).status_code == 200


async def test_long_grammars_are_refused_before_they_are_read(cluster: Cluster, monkeypatch):
    monkeypatch.setattr(texts, "from_lark_or_gbnf", None)
    monkeypatch.setattr(texts, "from_regex", None)
    long = "a" * (MAX_GRAMMAR_BYTES + 1)
    for fields in ({"grammar": long}, {"structured_outputs": {"regex": long}}, {"json_schema": "{}" + " " * 2**20}):
        answer = await cluster.complete(**fields)
        assert answer.status_code == 400 and "characters, more than" in answer.json()["error"]["message"]


THINKING = "<think>\nIs it <b>?</b> Yes.\n</think>\n\nForty-two."


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("opened", [False, True])
async def test_reasoning_is_split_off(thinking, opened, piece):
    """Whether the template opens it, as DeepSeek's does, or the model, as Qwen's."""
    async with run_cluster(thinking) as cluster:
        text = THINKING.removeprefix("<think>\n") if opened else THINKING
        cluster.decode[0].script = saying(text, piece)
        asked = {"chat_template_kwargs": {"opened": opened}}
        message = (await cluster.chat(**asked)).json()["choices"][0]["message"]
        assert message["content"] == "Forty-two."
        assert message["reasoning_content"] == "Is it <b>?</b> Yes."
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x") as client:
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, extra_body=asked)
            deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Forty-two."
        reasoning = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
        assert reasoning == "Is it <b>?</b> Yes."


OFF = "<think>\n\n</think>\n\n"


async def test_reasoning_is_switched_off_in_the_template(thinking):
    """By each API's own word for it, as chat_template_kwargs do; who sends these has the last word."""
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    messages = {"messages": MESSAGES, "max_tokens": 9}
    asked = [
        ("chat/completions", {"messages": MESSAGES}, {"reasoning_effort": "none"}),
        ("chat/completions", {"messages": MESSAGES}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("responses", {"input": "hi"}, {"reasoning": {"effort": "none"}}),
        ("messages", messages, {"thinking": {"type": "disabled"}}),
    ]
    async with run_cluster(thinking) as cluster:
        for path, body, off in asked:
            for more, ending in (({}, ""), (off, OFF), (off | kwargs, "")):
                answer = await cluster.http.post(f"/v1/{path}", json={"model": MODEL, **body, **more})
                assert answer.status_code == 200, answer.text
                assert prompt_of(cluster, thinking) == f"<|user|>hi<|end|><|assistant|>{ending}", (path, more)
        counted = [
            (await cluster.http.post("/v1/messages/count_tokens", json={"model": MODEL, **messages, **more})).json()
            for more in ({}, {"thinking": {"type": "disabled"}})
        ]
        assert counted[0]["input_tokens"] < counted[1]["input_tokens"]


async def test_reasoning_of_the_history_reaches_the_template(thinking):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    shown = "<|assistant|><think>\nHm.\n</think>\n\n"
    async with run_cluster(thinking) as cluster:
        for name in ("reasoning", "reasoning_content"):
            for said in ({"content": "Yes."}, {"content": None, "tool_calls": [call]}, {"content": None}, {}):
                turn = {"role": "assistant", name: "Hm.", **said}
                answer = await cluster.chat(messages=[*MESSAGES, turn, *MESSAGES])
                assert answer.status_code == 200, answer.text
                assert shown + (said.get("content") or "") in prompt_of(cluster, thinking), (name, said)


async def test_a_response_that_was_cut_off_while_it_reasoned_is_continued(thinking):
    async with (
        run_cluster(thinking) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client,
    ):
        cluster.decode[0].script = saying("<think>\nLet me see", finish=LENGTH)
        first = await client.responses.create(model=MODEL, input="hi", max_output_tokens=50)
        assert (first.status, [item.type for item in first.output]) == ("incomplete", ["reasoning"])
        cluster.decode[0].script = saying("Yes.")
        again = {"role": "user", "content": "go on"}
        whole = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), again]
        shown = "<think>\nLet me see\n</think>\n\n"
        for asked in ({"previous_response_id": first.id, "input": [again]}, {"input": whole}):
            assert (await client.responses.create(model=MODEL, **asked)).output_text == "Yes."
            assert prompt_of(cluster, thinking) == (
                f"<|user|>hi<|end|><|assistant|>{shown}<|end|><|user|>go on<|end|><|assistant|>"
            )


async def test_without_reasoning_a_thinking_model_answers_as_it_is(thinking):
    async with run_cluster(thinking) as cluster:
        cluster.decode[0].script = saying("<b>plain</b> <thin ice", 2)
        message = (await cluster.chat()).json()["choices"][0]["message"]
        assert message["content"] == "<b>plain</b> <thin ice" and message["reasoning_content"] is None
        cluster.decode[0].script = saying("<think>cut off", finish=2)
        message = (await cluster.chat()).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("", "cut off")
    async with run_cluster(thinking, reasoning_parser="none") as cluster:
        cluster.decode[0].script = saying(THINKING)
        assert (await cluster.chat()).json()["choices"][0]["message"]["content"] == THINKING


async def test_a_thinking_model_may_think_before_it_writes_json(thinking):
    async with run_cluster(thinking) as cluster:
        cluster.decode[0].script = matching
        for seed in range(8):
            asked = {"chat_template_kwargs": {"opened": bool(seed % 2)}, "seed": seed, "max_tokens": 450}
            choice = (await cluster.chat(json_schema=SCHEMA, **asked)).json()["choices"][0]
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
