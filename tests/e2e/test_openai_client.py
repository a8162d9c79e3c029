"""The official OpenAI client against a whole cluster of real processes with the model that ships."""

import functools
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import httpx
import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel, Field

from tests.e2e import cluster as processes
from tests.e2e.cluster import MODEL, ROOT, lint, started
from tests.e2e.schemas import hundred

QUESTION = [{"role": "user", "content": "What is grep?"}]
OUTPUTS = int(os.environ.get("KVRAIL_SCHEMA_OUTPUTS", "20"))
LONG = "A page of text about sockets, files and processes. " * 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started(tmp_path_factory, "--kv-dtype", "float32", "--prefill-wait-s", "0.01") as cluster:
        yield cluster


@functools.cache
def transformers_model():
    """The demo model and its tokenizer as transformers has them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / "models" / MODEL
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def transformers_answer(messages, max_new_tokens):
    model, tokenizer = transformers_model()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_chat_ends_by_itself_and_says_what_transformers_says(cluster):
    answer = cluster.client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == transformers_answer(QUESTION, 200)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_long_prompts_cross_from_the_prefill_worker(cluster):
    messages = [{"role": "user", "content": LONG + "What is a file?"}]
    answer = cluster.client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
    extension = answer.usage.model_extra["kvrail"]
    assert extension["prefill_worker"] and extension["kv_bytes"] > 0
    assert answer.choices[0].message.content == transformers_answer(messages, 24)
    again = cluster.client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_the_decode_worker_computes_prompts_that_would_wait_for_the_prefill_worker(cluster):
    def ask(number):
        prompt = f"{number} lines. {LONG * 2}"
        answer = cluster.client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=16)
        return answer.choices[0].text, answer.usage.model_extra["kvrail"]["prefill_worker"]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    here = sum(not worker for _, worker in together)
    assert 0 < here < len(together)
    placed = {
        labels["reason"]: n
        for name, labels, n in processes.samples(cluster.metrics["router"])
        if name == "kvrail_placements_total" and labels["role"] == "decode"
    }
    assert placed["overflow"] == here
    assert [text for text, _ in together] == [ask(number)[0] for number in range(8)]


def test_streaming_with_usage_says_the_same(cluster):
    whole = cluster.client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    chunks = list(
        cluster.client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 5


def test_completion_n_seed_logprobs_stop(cluster):
    asked = {"model": MODEL, "prompt": "def read_lines(path):\n", "max_tokens": 24, "temperature": 0.9, "seed": 4}
    first = cluster.client.completions.create(**asked, n=2, logprobs=3)
    second = cluster.client.completions.create(**asked, n=2, logprobs=3)
    texts = [choice.text for choice in sorted(first.choices, key=lambda c: c.index)]
    assert texts == [choice.text for choice in sorted(second.choices, key=lambda c: c.index)]
    assert texts[0] != texts[1]
    logprobs = first.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) > 0
    assert "".join(logprobs.tokens).startswith(first.choices[0].text[:5])
    cut = texts[0][6:10]
    stopped = cluster.client.completions.create(**asked, stop=[cut])
    assert stopped.choices[0].text == texts[0][: texts[0].index(cut)]
    assert stopped.choices[0].finish_reason == "stop"


def test_chat_logprobs_are_of_the_tokens_said(cluster):
    answer = cluster.client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2, max_tokens=8
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    assert all(item.logprob == item.top_logprobs[0].logprob <= 0 for item in content)
    assert b"".join(bytes(item.bytes) for item in content).decode() == answer.choices[0].message.content


def test_logprobs_of_prompts_are_those_of_transformers(cluster):
    """Also where the prefix is cached, of a prompt of several chunks, beside others, and in a stream."""
    model, tokenizer = transformers_model()
    prompts = [LONG + "What is a file?", "def read_lines(path):\n", LONG + "What is a socket?"]
    asked = {"model": MODEL, "prompt": prompts, "echo": True, "logprobs": 3, "max_tokens": 0}
    cluster.client.completions.create(**asked | {"logprobs": None, "echo": False, "max_tokens": 1})  # fills the cache
    answer = cluster.client.completions.create(**asked, extra_body={"prompt_logprobs": 0})
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            truth = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        targets = ids[0, 1:]
        told = choice.logprobs
        assert choice.text == prompt and told.token_logprobs[0] is None
        assert [
            prompt[at : at + len(token)] for at, token in zip(told.text_offset, told.tokens, strict=True)
        ] == told.tokens
        # Float32 sums over 4 layers in another order; a wrong row differs by several units.
        chosen = truth.gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(told.token_logprobs[1:]), chosen, rtol=0, atol=2e-3)
        best = truth.topk(3, dim=1).values
        found = torch.tensor([sorted(top.values(), reverse=True)[:3] for top in told.top_logprobs[1:]])
        torch.testing.assert_close(found, best, rtol=0, atol=2e-3)
        entries = choice.model_extra["prompt_logprobs"]
        assert entries[0] is None
        assert [list(entry) for entry in entries[1:]] == [[str(token)] for token in targets.tolist()]
        ranks = torch.tensor(
            [entry[str(token)]["rank"] for entry, token in zip(entries[1:], targets.tolist(), strict=True)]
        )
        assert ((ranks - 1 - (truth > chosen[:, None]).sum(dim=1)).abs() <= 1).all()  # near ties
    assert answer.usage.model_extra["kvrail"]["prefill_worker"] is None and answer.usage.completion_tokens == 0
    streamed = {}
    for chunk in cluster.client.completions.create(**asked, stream=True):
        (part,) = chunk.choices
        if part.logprobs is not None:
            streamed.setdefault(part.index, []).extend(part.logprobs.token_logprobs)
    assert streamed == {choice.index: choice.logprobs.token_logprobs for choice in answer.choices}


def refused(call):
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value.status_code, caught.value.body["param"], caught.value.body["code"]


def test_refusals_have_openais_shape(cluster):
    chat = cluster.client.chat.completions.create
    assert refused(lambda: chat(model="gpt-x", messages=QUESTION)) == (404, "model", "model_not_found")
    assert refused(lambda: chat(model=MODEL, messages=QUESTION, temperature=3))[:2] == (400, "temperature")
    assert refused(lambda: chat(model=MODEL, messages=QUESTION, max_tokens=0))[:2] == (400, "max_tokens")
    assert refused(lambda: chat(model=MODEL, messages=[]))[:2] == (400, "messages")
    too_long = [{"role": "user", "content": "word " * 20000}]
    status, _, code = refused(lambda: chat(model=MODEL, messages=too_long))
    assert (status, code) == (400, "context_length_exceeded")


def samples(url):
    return {(n, labels.get("stage") or labels.get("state")): value for n, labels, value in processes.samples(url)}


def test_parts_of_requests_add_up_and_pages_return(cluster):
    before = samples(cluster.metrics["router"])
    with ThreadPoolExecutor(8) as pool:
        ask = cluster.client.completions.create
        prompts = [LONG[i * 40 :] for i in range(8)]
        list(pool.map(lambda p: ask(model=MODEL, prompt=p, max_tokens=12), prompts))
    after = samples(cluster.metrics["router"])
    grown = {key: after[key] - before.get(key, 0.0) for key in after}
    parts = {k[1]: v for k, v in grown.items() if k[0] == "kvrail_request_stage_seconds_sum"}
    total = grown["kvrail_request_seconds_sum", None]
    assert total > 0 and parts["prefill"] > 0 and parts["decode"] > 0
    assert abs(sum(parts.values()) - total) <= 0.05 * total, parts
    for worker in ("prefill-0", "decode-0"):
        pages = {k[1]: v for k, v in samples(cluster.metrics[worker]).items() if k[0] == "kvrail_engine_pages"}
        assert pages["used"] == 0 and pages["cached"] > 0 and set(pages) == {"free", "used", "cached"}


@pytest.mark.parametrize("service", ["router", "prefill-0", "decode-0"])
def test_promtool_has_nothing_to_say(cluster, service):
    lint(httpx.get(cluster.metrics[service]).text)
    theirs = httpx.get(cluster.metrics[service] + "/vllm")
    assert theirs.status_code == 200 and ("vllm:" in theirs.text) is (service != "prefill-0")


def test_leaving_a_stream_frees_the_worker(cluster):
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        while not (line := next(lines)).startswith("data: "):
            continue
        assert json.loads(line[6:])["choices"]
        assert samples(cluster.metrics["decode-0"])["kvrail_engine_pages", "used"] > 0
    deadline = time.monotonic() + 20
    while samples(cluster.metrics["decode-0"])["kvrail_engine_pages", "used"]:
        assert time.monotonic() < deadline, "the pages of a request whose client left are still used"
        time.sleep(0.05)


def test_outputs_are_valid_or_cut(cluster):
    """Objects under schemas of all kinds, at temperature 1; `make test-schemas` asks for 1,000."""
    schemas = hundred()
    for each in schemas:
        jsonschema.Draft202012Validator.check_schema(each)
    chosen = schemas[:: max(1, len(schemas) // OUTPUTS)]

    def ask(number: int) -> str:
        schema = chosen[number % len(chosen)]
        described = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        answer = cluster.client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=1, seed=number, max_tokens=256, response_format=described
        )
        (choice,) = answer.choices
        if choice.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(choice.message.content))
        return choice.finish_reason

    with ThreadPoolExecutor(16) as pool:
        reasons = Counter(pool.map(ask, range(OUTPUTS)))
    assert set(reasons) <= {"stop", "length"} and reasons["stop"] > OUTPUTS // 2, reasons


class Command(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    level: Annotated[int, Field(ge=1, le=5)]
    also: Annotated[list[Literal["awk", "sed"]], Field(max_length=2)]
    note: Literal["old", "new"] | None


def test_parse_and_tools_with_the_official_client(cluster):
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 300}
    parsed = cluster.client.chat.completions.parse(response_format=Command, **asked).choices[0].message.parsed
    assert isinstance(parsed, Command)
    tools = [openai.pydantic_function_tool(Command)]
    forced = {**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = cluster.client.chat.completions.parse(**forced).choices
    assert choice.finish_reason == "tool_calls"
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Command)
    with cluster.client.chat.completions.stream(**forced) as stream:
        names = {event.name for event in stream if event.type == "tool_calls.function.arguments.delta"}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert names == {"Command"} and streamed.function.arguments == choice.message.tool_calls[0].function.arguments
    call = choice.message.model_dump(include={"role", "content", "tool_calls"})
    history = [*QUESTION, call, {"role": "tool", "tool_call_id": streamed.id, "content": "grep prints lines."}]
    answer = cluster.client.chat.completions.create(**{**asked, "messages": history})
    assert answer.choices[0].finish_reason in ("stop", "length")
