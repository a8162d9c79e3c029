"""Log probabilities of prompts: OpenAI's `echo` with `logprobs`, vLLM's `prompt_logprobs`."""

import json

import openai
import pytest

from kvrail.errors import WorkerUnavailableError
from kvrail.services.router.openai.logprobs import TokenTexts
from kvrail.services.router.openai.scored import ScoredPrompt
from kvrail.text import Tokenizer
from kvrail.values.sampling import PromptLogprobs
from kvrail.wire.v1 import decode_pb2
from tests.chats import chat_ids
from tests.router.cluster import MODEL, OUTPUT, Cluster, prompt_score, prompt_scores, run_cluster, write_output

TEXT = "the quick über fox"


def check_lists(lists, ids: list[int], text: str, tokenizer: Tokenizer, top: int, output: int) -> None:
    """Of the prompt and `output` tokens behind it."""
    assert lists.tokens[: len(ids)] == [tokenizer.token_text(i) for i in ids]
    assert lists.token_logprobs[: len(ids)] == [None, *(-0.5 - place for place in range(1, len(ids)))]
    assert lists.token_logprobs[len(ids) :] == [-0.5] * output
    assert lists.top_logprobs[0] is None
    for place in range(1, len(ids)):
        _, _, likely, values = prompt_score(place, ids[place], top)
        told = lists.top_logprobs[place]
        if any("\N{REPLACEMENT CHARACTER}" in tokenizer.token_text(i) for i in (ids[place], *likely)):
            continue  # parts of a character have one text, under which the most likely of them is told
        assert told[tokenizer.token_text(ids[place])] == -0.5 - place
        assert [told[tokenizer.token_text(i)] for i in likely] == values
    offsets = lists.text_offset
    assert offsets[0] == 0 and offsets == sorted(offsets) and len(offsets) == len(ids) + output
    for token, offset in zip(lists.tokens, offsets, strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or text[offset : offset + len(token)] == token


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_echo(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer, max_tokens):
    prompts = [TEXT, "hello", "x"]
    ids = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    assert len(ids[2]) == 1
    written = tokenizer.encode(OUTPUT, add_special_tokens=False)[:max_tokens]
    output = tokenizer.decode(written, skip_special_tokens=False)
    asked = {"model": MODEL, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2}
    for given in (prompts, ids):
        answer = await client.completions.create(prompt=given, **asked)
        assert answer.usage.completion_tokens == 6 * max_tokens
        for choice in answer.choices:
            prompt = choice.index // 2
            text = prompts[prompt] + output
            assert (choice.text, choice.finish_reason) == (text, "length")
            check_lists(choice.logprobs, ids[prompt], text, tokenizer, 2, max_tokens)
    assert not cluster.decode[0].requests[0].prefill_workers
    texts = dict.fromkeys(range(6), "")
    parts = {i: {} for i in range(6)}
    async for chunk in await client.completions.create(prompt=prompts, stream=True, **asked):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        for name, value in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            parts[choice.index].setdefault(name, []).extend(value)
    for choice in answer.choices:
        assert texts[choice.index] == choice.text
        assert parts[choice.index] == choice.logprobs.model_dump()


async def test_echo_without_likely_tokens_and_without_log_probabilities(cluster: Cluster):
    found = (await cluster.complete(prompt="fox", echo=True, logprobs=0, max_tokens=1)).json()["choices"][0]["logprobs"]
    assert [None if top is None else len(top) for top in found["top_logprobs"]] == [None] + [1] * (
        len(found["tokens"]) - 1
    )
    choice = (await cluster.complete(prompt="fox", echo=True, max_tokens=0)).json()["choices"][0]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("fox", None, "length")
    assert not cluster.decode[0].requests[-1].sampling.HasField("prompt_logprobs")
    refused = (await cluster.complete(max_tokens=0)).json()["error"]
    assert refused["param"] == "max_tokens" and "echo" in refused["message"]


@pytest.mark.parametrize("top", [0, 3])
async def test_prompt_logprobs(cluster: Cluster, tokenizer: Tokenizer, top):
    def check(told, ids):
        assert told[0] is None and len(told) == len(ids)
        for place, entry in enumerate(told[1:], start=1):
            _, rank, likely, values = prompt_score(place, ids[place], top)
            first = {"logprob": -0.5 - place, "rank": rank, "decoded_token": tokenizer.token_text(ids[place])}
            assert next(iter(entry.items())) == (str(ids[place]), first)
            for number, (token_id, value) in enumerate(zip(likely, values, strict=True), start=1):
                shown = {"logprob": value, "rank": number, "decoded_token": tokenizer.token_text(token_id)}
                assert entry[str(token_id)] == shown
            assert len(entry) == 1 + top

    completion = (await cluster.complete(prompt=[TEXT, "x"], prompt_logprobs=top, n=2)).json()
    for choice in completion["choices"]:
        check(choice["prompt_logprobs"], tokenizer.encode([TEXT, "x"][choice["index"] // 2], add_special_tokens=True))
        assert (choice["text"], choice["logprobs"]) == (OUTPUT, None)
    chat = (await cluster.chat(prompt_logprobs=top, n=2)).json()
    check(chat["prompt_logprobs"], chat_ids(tokenizer, [{"role": "user", "content": "hi"}]))
    assert (await cluster.chat()).json()["prompt_logprobs"] is None
    both = (await cluster.complete(prompt=TEXT, prompt_logprobs=top, echo=True, logprobs=1)).json()["choices"][0]
    check(both["prompt_logprobs"], tokenizer.encode(TEXT, add_special_tokens=True))
    assert {len(found) for found in both["logprobs"]["top_logprobs"][1:-1]} <= {1, 2}


async def test_a_worker_that_is_lost_halfway_is_replaced_and_nothing_comes_twice(tokenizer: Tokenizer):
    async def lost(worker, request):
        yield prompt_scores(request)[0]
        raise WorkerUnavailableError("gone")

    async with run_cluster(tokenizer, decode=2) as cluster:
        whole = (await cluster.complete(prompt=TEXT, echo=True, logprobs=1, max_tokens=2)).json()["choices"]
        for worker in cluster.decode:
            worker.requests.clear()

        async def once(worker, request):
            script = lost if sum(len(w.requests) for w in cluster.decode) == 1 else write_output
            async for reply in script(worker, request):
                yield reply

        for worker in cluster.decode:
            worker.script = once
        assert (await cluster.complete(prompt=TEXT, echo=True, logprobs=1, max_tokens=2)).json()["choices"] == whole
        assert sorted(request.scored_tokens for w in cluster.decode for request in w.requests) == [0, 3]


@pytest.mark.parametrize("change", ["none", "gap", "much", "ranks", "top"])
async def test_a_worker_that_says_something_else_is_not_believed(cluster: Cluster, change):
    async def script(worker, request):
        replies = prompt_scores(request)
        if change == "gap":
            replies[0].prompt_logprobs.first += 1
        elif change == "much":
            replies += replies[-1:]
        elif change == "ranks":
            del replies[0].prompt_logprobs.ranks[-1]
        elif change == "top":
            request.sampling.prompt_logprobs += 1
            replies = prompt_scores(request)
        for reply in replies if change != "none" else []:
            yield reply
        yield decode_pb2.GenerateReply(token_ids=[10], text="x", finish_reason=decode_pb2.FINISH_REASON_STOP)

    cluster.decode[0].script = script
    answer = await cluster.complete(prompt=TEXT, prompt_logprobs=1)
    assert answer.status_code >= 500, answer.text
    assert "log probabilities" in answer.json()["error"]["message"]


async def test_many_log_probabilities_are_written_beside_the_loop(cluster: Cluster, tokenizer: Tokenizer):
    """The body that a thread writes piece by piece is the JSON that is written at once."""
    ids = [5 + i % 250 for i in range(240)]
    asked = {"prompt": [ids], "prompt_logprobs": 20, "echo": True, "logprobs": 4, "max_tokens": 1}
    answer = await cluster.complete(**asked)
    told = answer.json()["choices"][0]
    assert len(told["prompt_logprobs"]) == len(ids) and len(told["logprobs"]["tokens"]) == len(ids) + 1
    assert answer.text == json.dumps(answer.json(), separators=(",", ":"))


def test_offsets_of_tokens_that_the_text_does_not_show(tokenizer: Tokenizer):
    """A special token at the front takes no place; one that the text shows does."""
    end, body = tokenizer.token_id("<|end|>"), tokenizer.encode("fox", add_special_tokens=False)
    ids = [end, *body, end]
    found = PromptLogprobs(1, [-1.0] * (len(ids) - 1), [1] * (len(ids) - 1))
    for text, first in (("fox<|end|>", 0), ("<|end|>fox<|end|>", len("<|end|>"))):
        shown, lists = ScoredPrompt(TokenTexts(tokenizer), ids, text).echo(found, 0)
        assert shown == text
        assert (lists["text_offset"][0], lists["text_offset"][1]) == (0, first)
        assert lists["text_offset"][-1] == len(text) - len("<|end|>")
