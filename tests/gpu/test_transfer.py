"""Whole transfers between two workers on one device: every exact codec's pages and tokens are raw's."""

import asyncio

import pytest
import torch

from kvrail.config.settings import DEMO_MODEL
from kvrail.text import load_tokenizer
from tests.cluster.test_codecs import content
from tests.cluster.test_equality import DEMO, prompt_of
from tests.gpu.devices import CARRIED, CUDA, DEVICES, EXACT, at_rest, forget, landed, lean_cluster
from tests.models import generate, tiny_model

PROMPTS = (prompt_of(65), prompt_of(500))
NO_DRAFTS = {"max_drafts": 0}
"""A verification computes several tokens at once, which on a GPU may round otherwise; these tests compare bits."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transport", CARRIED)
async def test_pages_and_tokens_of_every_exact_codec_are_raws(device, transport):
    async with lean_cluster(tiny_model("llama"), transport, device, decode=NO_DRAFTS) as c:
        (prefill,) = c.prefills.values()
        for prompt in PROMPTS:
            forget(c.decode)
            tokens = (await c.ask(prompt, local=True)).tokens
            landed(device)
            pages = [pool.clone() for pool in content(c.decode, prompt)]
            for name in sorted(EXACT, key=lambda name: name != "raw"):
                await c.settled()
                forget(c.decode, prefill)
                answer = await c.ask(prompt, codec=name)
                summary = answer.summary
                assert (summary.codec, summary.transport, summary.cached_tokens) == (name, transport, 0)
                assert summary.prefill_worker and answer.tokens == tokens, name
                landed(device)
                for ours, theirs, local in zip(content(c.decode, prompt), content(prefill, prompt), pages, strict=True):
                    assert ours.shape[1] == len(prompt) // 16
                    assert torch.equal(ours, theirs) and torch.equal(ours, local), name
        await at_rest(c)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("transport", CARRIED)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_greedy_tokens_equal_generate(device, transport, family):
    folder = tiny_model(family)
    async with lean_cluster(folder, transport, device, kv_dtype="float32") as c:
        for length in (1, 64, 65, 500):
            prompt = prompt_of(length)
            for cached in (0, (length - 1) // 16 * 16):
                answer = await c.ask(prompt, max_tokens=24)
                assert answer.tokens == {0: generate(str(folder), tuple(prompt), 24)}, length
                assert answer.summary.cached_tokens == cached
        await at_rest(c)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("transport", CARRIED)
async def test_the_demo_model_says_what_generate_says(device, transport):
    ids = load_tokenizer(DEMO_MODEL).encode((DEMO / "heldout.txt").read_text(), add_special_tokens=False)
    async with lean_cluster(DEMO, transport, device, kv_dtype="float32", max_frame_bytes=1 << 20) as c:
        for length in (64, 500):
            prompt = ids[100 : 100 + length]
            answer = await c.ask(prompt, max_tokens=24)
            assert answer.tokens == {0: generate(str(DEMO), tuple(prompt), 24)} and answer.summary.prefill_worker
        await at_rest(c)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("transport", CARRIED)
async def test_captured_steps_send_what_they_computed(device, transport):
    """Steps replay graphs, as they are served; pages leave while the layers behind them are computed."""
    folder = tiny_model("llama")
    options = {"kv_dtype": "float32", "eager": False, "prefix_cache": False}
    async with lean_cluster(folder, transport, device, **options) as c:
        prompts = [prompt_of(length) for length in (33, 70, 130, 200, 300, 500, 65, 90)]
        for _ in range(2):
            answers = await asyncio.gather(*(c.ask(prompt, max_tokens=24) for prompt in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == {0: generate(str(folder), tuple(prompt), 24)}, len(prompt)
                assert answer.summary.prefill_worker
        await at_rest(c)
