"""Prefill workers that say what cannot be, or send KV that is no numbers: the request is served all the same."""

import asyncio
import math

import pytest
import torch

from kvrail.codec.base import Block, PagedBlock
from kvrail.codec.raw.codec import RawCodec
from kvrail.rpc.prefill.replies import PrefillReplies
from kvrail.runtime import breaker
from kvrail.runtime.breaker import FAILURES
from kvrail.transport.tcp.messages import Address
from kvrail.wire.v1 import common_pb2
from tests.cluster.cluster import cluster
from tests.cluster.test_equality import prompt_of
from tests.cluster.test_faults import value
from tests.models import generate, tiny_model

PROMPT = tuple(prompt_of(300))


@pytest.fixture
def llama():
    return tiny_model("llama")


def saying(monkeypatch, change):
    """Prefill workers' first tokens are changed before they leave."""
    first_token = PrefillReplies.first_token

    def changed(replies, message):
        change(message)
        first_token(replies, message)

    monkeypatch.setattr(PrefillReplies, "first_token", changed)


def outside(message):
    message.token_ids[0] = 1 << 20


def a_second_one(message):
    message.token_ids.append(1)


def no_number(message):
    message.logprobs.add(logprob=math.nan)


def next_year(message):
    message.marks.append(common_pb2.Mark(moment="first_token", seconds=3e7))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (outside, "token id 1048576; the vocabulary has"),
        (a_second_one, "2 first tokens with 0 log probabilities"),
        (no_number, "1 first tokens with 1 log probabilities"),
        (next_year, "time of first_token is 30000000"),
    ],
)
async def test_first_tokens_that_cannot_be_harm_nobody(llama, monkeypatch, caplog, change, reason):
    saying(monkeypatch, change)
    async with cluster(llama) as c:
        beside, answer = await asyncio.gather(c.ask(PROMPT[1:], local=True), c.ask(PROMPT))
        assert answer.tokens == {0: generate(str(llama), PROMPT, 16)}
        assert beside.tokens == {0: generate(str(llama), PROMPT[1:], 16)}
        assert value(c.decode, "local") == 1 and reason in caplog.text
        await c.settled()


async def test_a_worker_that_never_tells_the_first_token_counts_as_silent(llama, monkeypatch):
    monkeypatch.setattr(PrefillReplies, "first_token", lambda replies, message: None)
    monkeypatch.setattr(PrefillReplies, "commit", lambda replies, spans=(): asyncio.sleep(3600))
    async with cluster(llama, decode={"transfer_timeout_s": 0.5}) as c, asyncio.timeout(60):
        answer = await c.ask(PROMPT)
        assert answer.tokens == {0: generate(str(llama), PROMPT, 16)}
        assert value(c.decode, "local") == 1
        await c.settled()


async def test_a_worker_that_names_another_host_is_left(llama, monkeypatch, caplog):
    pack = Address.pack
    monkeypatch.setattr(Address, "pack", lambda address: pack(address) + b"192.0.2.1")
    async with cluster(llama) as c:
        answer = await c.ask(PROMPT)
        assert answer.tokens == {0: generate(str(llama), PROMPT, 16)}
        assert value(c.decode, "local") == 1 and "the host that was called (127.0.0.1)" in caplog.text
        await c.settled()


async def test_kv_that_is_no_number_is_computed_here_and_stays_in_no_cache(llama, monkeypatch, caplog):
    """Its digest is right, so nothing is noticed before logits are made of it."""
    encode = RawCodec.encode

    def poisoned(self, pages, **options):
        block = pages.gather()
        return encode(self, PagedBlock.whole(Block(torch.full_like(block.keys, torch.nan), block.values)), **options)

    monkeypatch.setattr(RawCodec, "encode", poisoned)
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 600.0)
    async with cluster(llama, decode={"codec": "raw"}) as c:
        (address,) = c.prefills
        for number in range(FAILURES):
            prompt = (number, *PROMPT)
            answer = await c.ask(prompt, n=2)
            assert answer.tokens[0] == generate(str(llama), prompt, 16) and answer.summary.prefill_worker == address
            assert caplog.text.count(f"KV from prefill worker {address} gives no finite logits") >= number + 1
            again = await c.ask(prompt, local=True)  # finds in the cache what was computed here
            assert again.tokens == {0: answer.tokens[0]} and again.summary.cached_tokens
        answer = await c.ask(PROMPT)  # the worker has failed too often in a row to be asked again
        assert answer.tokens == {0: generate(str(llama), PROMPT, 16)} and not answer.summary.prefill_worker
        await c.settled()
