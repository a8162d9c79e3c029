"""Tools through the official client: calls as models write them, streamed and whole, or as a grammar makes them."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import jsonschema
import openai
import pytest

from kvrail.grammar import Grammars
from kvrail.services.router.plan.tools.forms import FORMS
from kvrail.text import Tokenizer, load_tokenizer
from kvrail.wire.v1 import common_pb2
from tests.router.cluster import MODEL, TEMPLATE, VOCABULARY, Cluster, run_cluster, status, until, write_tokenizer
from tests.router.writing import matching, saying

MESSAGES = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "Rom } \\" {", "unit": "C"}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
MISTRAL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
QUOTING = '{"a": "<tool_call> and </tool_call>"}'
DEEP = "[" * 1500
BOTH = [("weather", ARGUMENTS), ("now", "{}")]
WRITTEN = [
    ("hermes", HERMES, "", BOTH[:1]),
    ("hermes", f"{HERMES}\n{NOW}", "", BOTH),
    ("hermes", f"Let me look.\n\n{HERMES}\n{NOW}\n", "Let me look.", BOTH),
    ("hermes", '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1]}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {DEEP}', "", [("f", DEEP)]),
    ("hermes", f'<tool_call>{{"name": {DEEP}', f'<tool_call>{{"name": {DEEP}', []),
    ("hermes", "a < b, <tool and <tool_c", "a < b, <tool and <tool_c", []),
    ("hermes", "<tool_call>no</tool_call> x", "<tool_call>no</tool_call> x", []),
    ("hermes", '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    # JSON that is not complete: the arguments are what was written, without the marks of the form
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1\n</tool_call>', "", [("f", '{"a": 1')]),
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {{"a": 1\n{NOW}', "", [("f", '{"a": 1'), BOTH[1]]),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": "x\n</tool_call>\n{NOW}',
        "",
        [("f", '{"a": "x'), BOTH[1]],
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": "x</tool_call>\n{NOW}',
        "",
        [("f", '{"a": "x'), BOTH[1]],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>', "", [("f", '{"a": "x}}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> So.', "So.", [("f", '{"a": 1}')]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{}}, "i</tool_call>{NOW}', "", [("f", "{}"), BOTH[1]]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}</tool_call>', "", [("f", '"{}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x ', "", [("f", '{"a": "x ')]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {QUOTING}}}</tool_call>', "", [("f", QUOTING)]),
    ("mistral", '[TOOL_CALLS]f{"a": [1[TOOL_CALLS]now{}', "", [("f", '{"a": [1'), BOTH[1]]),
    ("llama3_json", LLAMA, "", BOTH[:1]),
    ("llama3_json", f"<|python_tag|>{LLAMA}; " + '{"name": "now", "parameters": {}}', "", BOTH),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", f"Say {LLAMA}", f"Say {LLAMA}", []),
    ("mistral", f"[TOOL_CALLS][{MISTRAL}]", "", BOTH[:1]),
    ("mistral", f"[TOOL_CALLS] [{MISTRAL}, " + '{"name": "now", "arguments": {}}]', "", BOTH),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", "", BOTH),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{}", "", [("f", "{}")]),
    ("mistral", "[TOOL_ and more", "[TOOL_ and more", []),
]


@asynccontextmanager
async def roomy(tokenizer: Tokenizer, **settings) -> AsyncIterator[Cluster]:
    """A cluster whose context has room for tools."""
    async with run_cluster(tokenizer, **settings) as cluster:
        model = common_pb2.ModelInfo(name=MODEL, fingerprint="f" * 64, vocab_size=VOCABULARY, max_model_len=4096)
        for worker in (*cluster.decode, *cluster.prefill):
            worker.status = status(model=model)
        await until(lambda: cluster.service.pool.limits().context == 4096)
        yield cluster


@pytest.fixture
async def cluster(tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    async with roomy(tokenizer) as running:
        yield running


async def ask(cluster: Cluster, stream: bool, **fields):
    """Content, calls and finish reason of one answer, as the client puts them together."""
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0, http_client=cluster.http)
    asked = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, **fields}
    if not stream:
        (choice,) = (await client.chat.completions.create(**asked)).choices
    else:
        async with client.chat.completions.stream(**asked) as events:
            (choice,) = (await events.get_final_completion()).choices
    message = choice.message
    return message.content or "", message.tool_calls or [], choice.finish_reason


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
async def test_calls_are_read_as_models_write_them(tokenizer, form):
    async with roomy(tokenizer, tool_parser=form) as cluster:
        for _, text, content, calls in [case for case in WRITTEN if case[0] == form]:
            for stream, piece in [(False, 4), (True, 1), (True, 4), (True, 1000)]:
                cluster.decode[0].script = saying(text, piece)
                said, found, reason = await ask(cluster, stream)
                assert [(call.function.name, call.function.arguments) for call in found] == calls, text
                assert said == content
                assert reason == ("tool_calls" if calls else "stop")
                assert len({call.id for call in found}) == len(calls)
                assert all(len(call.id) == 9 if form == "mistral" else call.id.startswith("call_") for call in found)


async def test_without_tools_nothing_is_taken_for_a_call(cluster: Cluster):
    cluster.decode[0].script = saying(HERMES)
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        said, found, reason = await ask(cluster, stream=False, **fields)
        assert (said, found, reason) == (HERMES, [], "stop")


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_must_come_does_and_is_valid(tokenizer, form, choice):
    async with roomy(tokenizer, tool_parser=form) as cluster:
        cluster.decode[0].script = matching
        ended = 0
        for seed in range(2):
            asked = {"tool_choice": choice, "seed": seed, "max_tokens": 300, "parallel_tool_calls": bool(seed)}
            content, calls, reason = await ask(cluster, stream=bool(seed), **asked)
            assert not content and calls
            if reason == "length":
                continue
            ended += 1
            assert reason == "tool_calls" and (len(calls) == 1 or seed)
            for call in calls:
                assert call.function.name in ("weather", "now")[: 2 if choice == "required" else 1]
                schema = CITY if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
                jsonschema.validate(json.loads(call.function.arguments), schema)
        assert ended


async def test_a_model_that_may_call_answers_in_the_form_or_calls(cluster: Cluster):
    """With response_format beside tools the output is one or the other."""
    cluster.decode[0].script = matching
    kinds = set()
    for seed in range(8):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
        content, calls, reason = await ask(cluster, stream=False, response_format=form, seed=seed, max_tokens=200)
        if reason != "length":
            kinds.add(reason)
            jsonschema.validate(json.loads(calls[0].function.arguments if calls else content), {"type": "object"})
            if not calls:
                jsonschema.validate(json.loads(content), CITY)
    assert kinds == {"stop", "tool_calls"}


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
GOOD = LLAMA.replace(ARGUMENTS, '{"city": "Rom", "unit": "C"}')


async def follower(cluster: Cluster, **fields) -> Callable[[str], bool]:
    """Says whether a text is an output that the grammar of a request allows."""
    await ask(cluster, stream=False, **fields)
    text = cluster.decode[0].requests[-1].sampling.grammar
    grammar = await Grammars(lambda: cluster.decode[0].tokenizer).get(text, "")

    def follows(said: str) -> bool:
        tokens = cluster.decode[0].tokenizer.encode(said, add_special_tokens=False)
        matcher = grammar.matcher()
        return matcher.move_to(tokens) == len(tokens) and matcher.complete

    return follows


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
async def test_all_calls_of_strict_functions_are_constrained(tokenizer, tmp_path, form, special):
    """special: whether the mark of a call is a special token."""

    def calls(*objects: str) -> str:
        if form == "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        return "; ".join(objects) if form == "llama3_json" else f"[TOOL_CALLS][{', '.join(objects)}]"

    mark = FORMS[form].opens
    if special:
        write_tokenizer(tmp_path, special=[mark])
        tokenizer = load_tokenizer(str(tmp_path))
    good = GOOD if form == "llama3_json" else GOOD.replace("parameters", "arguments")
    bad = good.replace('"C"', '"K"')
    async with roomy(tokenizer, tool_parser=form) as cluster:
        await ask(cluster, stream=False, tools=TOOLS)
        assert cluster.decode[0].requests[-1].sampling.grammar == ""
        follows = await follower(cluster, tools=STRICT)
        for text in ("", "Nothing to call.", calls(good), calls(good, good), f"{calls(good, good)} Done."):
            assert follows(text), text
        assert follows(f"Let me look.\n{mark if form == 'llama3_json' else ''}{calls(good)}")
        again = [f"{calls(good)}{between}{calls(bad)}" for between in ("", "\n", "\nAnd:\n")]
        if form == "llama3_json":
            again[-1] = f"{calls(good)}\nAnd: {mark}{bad}"  # without the mark it would be text
        for text in (calls(bad), calls(good, bad), f"{mark}nonsense", f"{calls(good)} {mark}nonsense", *again):
            assert not follows(text), text
        one = await follower(cluster, tools=STRICT, parallel_tool_calls=False)
        assert one("") and one(calls(good)) and not one(calls(good, good))


async def test_without_parallel_calls_the_first_one_is_told(cluster: Cluster):
    cluster.decode[0].script = saying(f"Both.\n{HERMES}\n{NOW}")
    for stream in (False, True):
        for parallel, told in ((False, BOTH[:1]), (True, BOTH)):
            said, calls, reason = await ask(cluster, stream, parallel_tool_calls=parallel)
            assert (said, reason) == ("Both.", "tool_calls")
            assert [(call.function.name, call.function.arguments) for call in calls] == told


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
]


async def test_histories_with_calls_need_no_tools(cluster: Cluster):
    """A template that knows no tools gets them as text."""
    answer = await cluster.chat(messages=HISTORY)
    assert answer.status_code == 200, answer.text
    (request,) = cluster.decode[0].requests
    prompt = cluster.decode[0].tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    assert prompt == (
        f"<|user|>Weather?<|end|><|assistant|>{called}<|end|>"
        "<|user|><tool_response>\nSunny.\n</tool_response><|end|><|assistant|>"
    )


async def test_results_of_several_calls_are_one_turn_with_what_is_said_behind_them(tmp_path):
    """As Gemma's template wants it, which refuses two messages of one role."""
    turns = "{% for m in messages %}{% if loop.changed(m.role) %}{% else %}{{ raise_exception('no turn') }}{% endif %}"
    write_tokenizer(tmp_path, turns + "{{ m.role }}:{{ m.content }}|{% endfor %}")
    async with roomy(load_tokenizer(str(tmp_path))) as cluster:
        result = {"role": "tool", "tool_call_id": "call_2", "content": "Noon."}
        assert (await cluster.chat(messages=[*HISTORY, result, *HISTORY[1:]])).status_code == 200
        ids = list(cluster.decode[0].requests[-1].prompt_token_ids)
        prompt = cluster.decode[0].tokenizer.decode(ids, skip_special_tokens=False)
        both = "user:<tool_response>\nSunny.\n</tool_response>\n<tool_response>\nNoon.\n</tool_response>|assistant:"
        assert both in prompt
        said = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Go."}]
        assert (await cluster.chat(messages=[*HISTORY, *said, *HISTORY[:1]])).status_code == 200
        ids = list(cluster.decode[0].requests[-1].prompt_token_ids)
        prompt = cluster.decode[0].tokenizer.decode(ids, skip_special_tokens=False)
        assert prompt.endswith("user:<tool_response>\nSunny.\n</tool_response>\nSo?|assistant:Go.|user:Weather?|")


async def test_tools_are_shown_to_a_template_that_knows_none(cluster: Cluster):
    shown = []
    for messages in (MESSAGES, [{"role": "system", "content": "Be kind."}, *MESSAGES]):
        await cluster.chat(messages=messages, tools=TOOLS)
        ids = list(cluster.decode[0].requests[-1].prompt_token_ids)
        shown.append(cluster.decode[0].tokenizer.decode(ids, skip_special_tokens=False))
    assert all(json.dumps(tool, ensure_ascii=False) in prompt for tool in TOOLS for prompt in shown)
    assert shown[0].startswith("<|system|>You may call") and shown[1].startswith("<|system|>Be kind.\n\nYou may call")


OWN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}:{{ c.function.arguments.city }}{% endfor %}<|end|>{% endfor %}"
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
)


async def test_a_template_that_knows_tools_shows_them_itself(tmp_path):
    """Its marks also tell the form of calls; arguments reach it as an object."""
    write_tokenizer(tmp_path, OWN)
    async with roomy(load_tokenizer(str(tmp_path))) as cluster:
        cluster.decode[0].script = saying(f"[TOOL_CALLS][{MISTRAL}]")
        answer = await cluster.chat(messages=HISTORY, tools=TOOLS)
        assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        ids = list(cluster.decode[0].requests[-1].prompt_token_ids)
        prompt = cluster.decode[0].tokenizer.decode(ids, skip_special_tokens=False)
        assert prompt.endswith("[TOOL_CALLS]weather:Rom<|end|><|tool|>Sunny.<|end|><weather><now>")


@pytest.mark.parametrize("shown", ["", "<tool_call>\n<function=f>", "<tool_call>{name}\n<arg_key>a</arg_key>"])
async def test_tools_are_refused_where_the_form_of_calls_is_unknown(tmp_path, shown: str):
    write_tokenizer(tmp_path, f"{TEMPLATE}{{{{ tools }}}}{shown}")
    async with roomy(load_tokenizer(str(tmp_path))) as cluster:
        answer = await cluster.chat(tools=TOOLS)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        assert (await cluster.chat(tools=TOOLS, tool_choice="none")).status_code == 200
