"""Stop strings that are special tokens: no text has them, so workers are told their ids."""

import anthropic
import openai
import pytest

from kvrail.text import Tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import MODEL, Cluster, summary
from tests.router.scripts import error_of

HI = [{"role": "user", "content": "hi"}]
STOP = decode_pb2.FINISH_REASON_STOP


def drawing(special: str):
    """A worker that writes a text and then a special token, which ends it if it is a stop token."""

    async def script(worker, request):
        token_id = worker.tokenizer.token_id(special)
        yield decode_pb2.GenerateReply(token_ids=[10], text="text")
        if token_id in request.sampling.stop_token_ids:
            yield decode_pb2.GenerateReply(token_ids=[token_id], finish_reason=STOP, stop_reason=str(token_id))
        else:
            yield decode_pb2.GenerateReply(token_ids=[token_id])
            yield decode_pb2.GenerateReply(token_ids=[11], text=" goes on", finish_reason=STOP)
        yield decode_pb2.GenerateReply(summary=summary(1, 2))

    return script


@pytest.mark.parametrize("special", ["<|end|>", "<|user|>"])  # the first ends sequences anyway
async def test_a_stop_string_that_is_a_special_token(cluster: Cluster, client: openai.AsyncOpenAI, special: str):
    cluster.decode[0].script = drawing(special)
    chat = await client.chat.completions.create(model=MODEL, messages=HI, stop=["other", special])
    (choice,) = chat.choices
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("text", "stop", special)
    completion = await client.completions.create(model=MODEL, prompt="hi", stop=special)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("text", "stop", special)


async def test_stop_sequences_too(cluster: Cluster):
    cluster.decode[0].script = drawing("<|user|>")
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="unused", max_retries=0) as claude:
        answer = await claude.messages.create(model=MODEL, max_tokens=9, messages=HI, stop_sequences=["<|user|>"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("text", "stop_sequence", "<|user|>")


async def test_what_is_asked_by_id_is_told_as_an_id(cluster: Cluster, tokenizer: Tokenizer):
    cluster.decode[0].script = drawing("<|user|>")
    token_id = tokenizer.token_id("<|user|>")
    answer = await cluster.chat(stop=["<|end|>"], stop_token_ids=[token_id])
    assert answer.json()["choices"][0]["stop_reason"] == token_id
    end = tokenizer.token_id("<|end|>")
    assert list(cluster.decode[0].requests[0].sampling.stop_token_ids) == [token_id, end]


async def test_other_stop_strings_stay_texts(cluster: Cluster):
    answer = await cluster.chat(stop=["a", "<|user|> ", "x<|end|>"])  # "a" is a token too, of ordinary text
    assert answer.status_code == 200
    assert not cluster.decode[0].requests[0].sampling.stop_token_ids


async def test_special_tokens_that_the_model_has_no_logits_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tokenizer, "special_id", lambda self, text: 300)  # one past the vocabulary
    assert (await cluster.chat(stop=["<|end|>"])).status_code == 200
    assert not cluster.decode[0].requests[0].sampling.stop_token_ids
    error_of(await cluster.chat(stop_token_ids=[300]), 400, None)
