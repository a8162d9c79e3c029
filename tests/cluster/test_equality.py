"""Served tokens equal what transformers' own `generate` gives, whatever way the KV took."""

import asyncio
import random
from pathlib import Path

import pytest

from kvrail.config.settings import DEMO_MODEL
from kvrail.text import load_tokenizer
from tests.cluster.cluster import cluster, each_with_a_transport
from tests.models import FAMILIES, generate, tiny_model

DEMO = Path(DEMO_MODEL)
LENGTHS = (1, 63, 64, 65, 500, 1100)


def prompt_of(length, seed=0):
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("family,transport", each_with_a_transport(FAMILIES))
async def test_greedy_tokens_equal_generate(family, transport):
    folder = tiny_model(family)
    async with cluster(folder, transport) as c:
        prompts = [prompt_of(length) for length in LENGTHS]
        expected = [generate(str(folder), tuple(prompt), 24) for prompt in prompts]
        assert all(len(set(each)) > 4 for each in expected), "the model says too little for this test to mean anything"
        for length, prompt, tokens in zip(LENGTHS, prompts, expected, strict=True):
            cold = await c.ask(prompt, max_tokens=24)
            assert cold.tokens == {0: tokens}, length
            assert cold.summary.cached_tokens == 0 and cold.summary.prefill_worker
            marks = {mark.moment: mark.seconds for mark in cold.summary.marks}
            exposed = marks["kv_complete"] - marks["prefill_finished"]
            assert cold.summary.transport == transport and cold.summary.exposed_s == pytest.approx(max(0, exposed))
        # Pages that the decode worker holds do not cross again.
        answers = await asyncio.gather(*(c.ask(prompt, max_tokens=24) for prompt in prompts))
        for length, warm, tokens in zip(LENGTHS, answers, expected, strict=True):
            assert warm.tokens == {0: tokens}, length
            assert warm.summary.cached_tokens == (length - 1) // 64 * 64
        await c.settled()


async def test_the_demo_model_says_what_generate_says():
    text = (DEMO / "heldout.txt").read_text()
    ids = load_tokenizer(str(DEMO)).encode(text * 2, add_special_tokens=False)
    async with cluster(DEMO) as c:
        prompts = [ids[100 : 100 + length] for length in (1, 64, 65, 600)]
        expected = [{0: generate(str(DEMO), tuple(prompt), 12)} for prompt in prompts]
        for _ in range(2):  # cold, then with the prefix cached
            answers = await asyncio.gather(*(c.ask(prompt, max_tokens=12) for prompt in prompts))
            assert [answer.tokens for answer in answers] == expected
        await c.settled()


@pytest.mark.parametrize(("family", "chunk"), [("llama", 37), ("gemma2", 64), ("gemma2", 100)])
async def test_chunk_size_changes_nothing(family, chunk):
    folder = tiny_model(family)
    async with cluster(folder, "tcp", max_batch_tokens=chunk, max_running=16) as c:
        for length in (63, 65, 500):
            prompt = prompt_of(length)
            answer = await c.ask(prompt)
            assert answer.tokens == {0: generate(str(folder), tuple(prompt), 16)}
        await c.settled()


async def test_shared_prefixes_and_tiny_frames():
    """Hits on both sides, at different depths; frames of one page of one layer each."""
    folder = tiny_model("qwen3")
    page_bytes = 64 * 2 * 2 * 16 * 4  # one layer of one page, keys and values, float32
    async with cluster(folder, "tcp", max_frame_bytes=page_bytes) as c:
        base = prompt_of(400)
        for cut in (400, 390, 200, 130, 64, 400):
            prompt = [*base[:cut], *prompt_of(90, seed=cut)]
            answer = await c.ask(prompt)
            assert answer.tokens == {0: generate(str(folder), tuple(prompt), 16)}
        await c.settled()


async def test_local_and_remote_prefill_agree():
    folder = tiny_model("llama")
    prompt = prompt_of(300)
    async with cluster(folder, prefix_cache=False) as c:
        remote = await c.ask(prompt, temperature=0.9, seed=5, max_tokens=32)
        local = await c.ask(prompt, temperature=0.9, seed=5, max_tokens=32, local=True)
        other = await c.ask(prompt, temperature=0.9, seed=6, max_tokens=32)
        assert remote.tokens == local.tokens != other.tokens
        assert remote.summary.prefill_worker and not local.summary.prefill_worker
        await c.settled()


async def test_short_prompts_stay_with_the_decode_worker():
    async with cluster(tiny_model("llama"), decode={"local_prefill_tokens": 64}) as c:
        short, long = await c.ask(prompt_of(64)), await c.ask(prompt_of(65))
        assert not short.summary.prefill_worker and long.summary.prefill_worker


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"])
async def test_every_page_type_crosses_exactly(kv_dtype):
    """Rounded KV gives other tokens than float32, but the same ones wherever the prompt was computed."""
    folder = tiny_model("llama")
    async with cluster(folder, kv_dtype=kv_dtype, prefix_cache=False) as c:
        for length in (65, 500):
            remote = await c.ask(prompt_of(length), codec="raw")
            local = await c.ask(prompt_of(length), local=True)
            assert remote.tokens == local.tokens
            assert remote.summary.kv_bytes == remote.summary.kv_raw_bytes > 0
        await c.settled()
