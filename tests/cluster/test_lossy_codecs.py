"""Lossy codecs on the wire: only where the operator lets them, told in the answer, and never `auto`'s choice."""

import pytest
import torch

from kvrail.codec import registry
from kvrail.codec.base import Block, PagedBlock
from kvrail.config.settings import DecodeSettings
from kvrail.errors import InvalidRequestError
from kvrail.worker.codecs import Codecs
from tests.cluster.cluster import cluster, settings
from tests.cluster.test_codecs import SHARED, content
from tests.cluster.test_equality import prompt_of
from tests.models import tiny_model

NAMES = ("int8", "int4", "kvcomp")
ALLOWED = {"decode": {"allow_lossy": True}}


def restored(name, pools):
    """What the codec leaves of keys and values, given and returned as bytes of pages."""
    block = Block(*(pool.contiguous().view(torch.bfloat16) for pool in pools))
    out = Block(torch.empty_like(block.keys), torch.empty_like(block.values))
    codec = registry.get(name)
    codec.decode(0, [codec.encode(PagedBlock.whole(block)).stages()[0]], PagedBlock.whole(out))
    return [tensor.view(torch.uint8) for tensor in out.tensors()]


@pytest.mark.parametrize("name", NAMES)
async def test_they_need_the_operators_leave(name):
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", **SHARED) as c:
        with pytest.raises(InvalidRequestError, match=rf"'{name}' is lossy: .*--allow-lossy") as refused:
            await c.ask(prompt_of(100), codec=name)
        assert refused.value.param == "codec"
        assert name in (await c.client.get_status(timeout_s=5)).withheld_codecs
        await c.settled()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
async def test_pages_arrive_as_the_codec_leaves_them_and_the_answer_says_so(name, dtype):
    prompt = prompt_of(500)
    async with cluster(tiny_model("llama"), kv_dtype=dtype, **ALLOWED, **SHARED) as c:
        (prefill,) = c.prefills.values()
        answer = await c.ask(prompt, codec=name)
        assert answer.summary.lossy and answer.summary.codec == name and len(answer.tokens[0]) == 16
        assert 0 < answer.summary.kv_bytes < 0.75 * answer.summary.kv_raw_bytes
        if dtype == "bfloat16":
            sent, ours = content(prefill, prompt), content(c.decode, prompt, name)
            assert all(torch.equal(a, b) for a, b in zip(restored(name, sent), ours, strict=True))
            assert not all(torch.equal(a, b) for a, b in zip(sent, ours, strict=True))
        assert not (await c.ask(prompt_of(300, seed=2), codec="raw")).summary.lossy
        await c.settled()


@pytest.mark.parametrize("name", NAMES)
async def test_an_exact_request_never_meets_pages_that_lost_bits(name):
    prompt = prompt_of(500)
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", **ALLOWED, **SHARED) as c:
        exact = (await c.ask(prompt, codec="raw", max_tokens=40)).tokens
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", **ALLOWED, **SHARED) as c:
        first = await c.ask(prompt, codec=name, max_tokens=40)
        written = [*prompt, *first.tokens[0]]  # what was generated on such pages has lost as much
        for asked in (prompt, written):
            again = await c.ask(asked, codec="raw", max_tokens=40)
            assert again.summary.cached_tokens == 0 or asked is written
            assert not again.summary.lossy
            if asked is prompt:
                assert again.tokens == exact
        shared = await c.ask(prompt, codec=name, max_tokens=40)
        assert shared.summary.cached_tokens > 0 and shared.summary.lossy and shared.tokens == first.tokens
        await c.settled()


async def test_who_asks_for_exact_kv_gets_no_lossy_codec():
    decode = {"allow_lossy": True, "codec": "int4"}
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", decode=decode, **SHARED) as c:
        c.fetcher.chooser._fallback = "raw"  # which needs no compilation
        assert (await c.ask(prompt_of(300))).summary.lossy
        exact = (await c.ask(prompt_of(300), exact=True)).summary
        assert (exact.lossy, exact.cached_tokens, exact.codec) == (False, 0, "raw")
        assert not (await c.ask(prompt_of(300, seed=2), exact=True, codec="raw")).summary.lossy
        with pytest.raises(InvalidRequestError, match="'int4' is lossy, but the request asks for exact KV") as refused:
            await c.ask(prompt_of(300), exact=True, codec="int4")
        assert refused.value.param == "codec"
        await c.settled()


async def test_auto_never_has_them_to_choose_from():
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", **ALLOWED, **SHARED) as c:
        options = settings(DecodeSettings, tiny_model("llama"), kv_dtype="bfloat16", allow_lossy=True, codec="auto")
        codecs = Codecs(options, allow_lossy=options.allow_lossy)
        assert set(NAMES) < set(codecs.names) and not set(NAMES) & set(codecs.automatic)
        assert codecs.automatic[0] == "raw" and all(registry.get(name).exact for name in codecs.automatic)
        await c.settled()
