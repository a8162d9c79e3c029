"""Encoding in turns of clients: who gets through, what is never encoded, and what is refused unread."""

import asyncio
import threading

import httpx
import pytest

from kvrail.errors import ContextLengthError
from kvrail.services.router.plan.encoding import LONG_CHARS, MAX_COUNTED_CHARS, Encoder
from kvrail.services.router.schema import ChatRequest, CompletionRequest, TokenizeRequest
from tests.router.cluster import CONTEXT, MODEL, Cluster

LONG = "x" * (LONG_CHARS + 1)


class Blocked:
    """A tokenizer's `encode` that waits until it is let go, and notes the last words of what it encodes."""

    def __init__(self, tokenizer, monkeypatch):
        self.begun, self.first, self.gate = [], asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(tokenizer, "encode", self._encode)

    def _encode(self, text, add_special_tokens, most=None):
        self.begun.append(text.rpartition("x")[2])
        self._loop.call_soon_threadsafe(self.first.set)
        self.gate.wait()
        return [1]


def asking(encoder, client, text, kind):
    if kind == "tokenize":
        return asyncio.create_task(encoder.tokenize(TokenizeRequest(prompt=text), client))
    if kind == "completion":
        return asyncio.create_task(encoder.prompts(CompletionRequest(model=MODEL, prompt=text), client))
    chat = ChatRequest(model=MODEL, messages=[{"role": "user", "content": text}], add_generation_prompt=False)
    return asyncio.create_task(encoder.chat(chat, client))


@pytest.mark.parametrize("kind", ["tokenize", "completion"])
async def test_one_clients_long_texts_wait_behind_its_own(tokenizer, monkeypatch, kind):
    """Another client's one comes next; of a client that leaves nothing is encoded."""
    encoder, blocked = Encoder(tokenizer), Blocked(tokenizer, monkeypatch)
    tasks = [asking(encoder, "greedy", f"{LONG}{i} b", kind) for i in range(4)]
    await blocked.first.wait()
    left = [asking(encoder, "left", f"{LONG}7 b", kind) for _ in range(3)]
    tasks.append(asking(encoder, "modest", f"{LONG}m", kind))
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    blocked.gate.set()
    await asyncio.gather(*tasks)
    assert blocked.begun == ["0 b", "m", "1 b", "2 b", "3 b"]


async def test_a_long_chat_takes_its_turn_by_the_text_of_its_template(tokenizer, monkeypatch):
    """Whatever made it long: here the messages' number and the reasoning, not one content."""
    encoder, blocked = Encoder(tokenizer), Blocked(tokenizer, monkeypatch)
    tasks = [asking(encoder, "greedy", LONG, "tokenize")]
    await blocked.first.wait()
    many = ChatRequest(model=MODEL, messages=[{"role": "user", "content": "x" * 100}] * 1100)
    tasks.append(asyncio.create_task(encoder.chat(many, "modest")))
    short = asking(encoder, "modest", "short", "chat")
    while len(blocked.begun) < 2:
        await asyncio.sleep(0.001)
    blocked.gate.set()
    await asyncio.gather(short, *tasks)
    assert len(blocked.begun) == 3  # the short one ran beside the long one, the long chat behind it


async def test_what_is_too_long_is_refused_unread(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "encode", None)
    encoder = Encoder(tokenizer)
    long = "x" * (CONTEXT * tokenizer.longest_text + 1)
    with pytest.raises(ContextLengthError, match=r"prompt: .* characters"):
        await encoder.prompts(CompletionRequest(model=MODEL, prompt=["x", long]), "a", CONTEXT)
    with pytest.raises(ContextLengthError, match=r"messages: .* characters"):
        await encoder.chat(ChatRequest(model=MODEL, messages=[{"role": "user", "content": long}]), "a", CONTEXT)
    counted = "x" * (MAX_COUNTED_CHARS + 1)
    with pytest.raises(ContextLengthError, match=rf"prompt: .* {MAX_COUNTED_CHARS} "):
        await encoder.tokenize(TokenizeRequest(prompt=counted), "a")
    with pytest.raises(ContextLengthError, match=rf"messages: .* {MAX_COUNTED_CHARS} "):
        await encoder.tokenize(TokenizeRequest(messages=[{"role": "user", "content": counted}]), "a")


async def test_a_text_whose_sender_has_left_is_not_encoded(cluster: Cluster, tokenizer, monkeypatch):
    blocked = Blocked(tokenizer, monkeypatch)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:

        def post(text):
            return asyncio.create_task(http.post("/tokenize", json={"model": MODEL, "prompt": LONG + text}))

        first = post("first")
        await blocked.first.wait()
        left = [post("gone") for _ in range(3)]
        while cluster.service.admission.active < 4:
            await asyncio.sleep(0.001)
        for task in left:
            task.cancel()
        while cluster.service.admission.active > 1:
            await asyncio.sleep(0.001)
        last = post("a 1")
        blocked.gate.set()
        assert [(await task).status_code for task in (first, last)] == [200, 200]
    assert blocked.begun == ["first", "a 1"]


async def test_workers_hear_whose_request_it_is(cluster: Cluster):
    assert (await cluster.chat()).status_code == 200
    assert cluster.decode[0].requests[-1].client == "127.0.0.1"
