"""Workers that prefill and decode: tokens equal generate's in every mix of roles, and nothing waits in a circle."""

import asyncio

import pytest

from kvrail.errors import KvrailError
from kvrail.values.sampling import SamplingParams
from tests.cluster.both import both_workers
from tests.cluster.cluster import TRANSPORTS
from tests.cluster.test_equality import prompt_of
from tests.models import generate, tiny_model

FOLDER = tiny_model("qwen3")


def expected(prompt, tokens=16):
    return {0: generate(str(FOLDER), tuple(prompt), tokens)}


async def together(asked):
    """Answers of requests that run at once."""
    async with asyncio.timeout(120):
        return await asyncio.gather(*asked)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_both_ways_at_once(transport):
    """Each worker computes for the other, for itself, and decodes, all at the same time."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 64, 65, 300, 500, 130, 700, 90))]
    async with both_workers(FOLDER, transport) as pair:
        for _ in range(2):  # cold, then with prefixes cached
            asked = [each.ask(prompt, local=local) for prompt in prompts for each in pair for local in (False, True)]
            answers = await together(asked)
            for number, answer in enumerate(answers):
                assert answer.tokens == expected(prompts[number // 4])
            fetched = [answer.summary.prefill_worker for answer in answers]
            assert not any(fetched[1::2])
        for each in pair:
            await each.settled()


async def test_sampled_output_is_the_same_either_way():
    params = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "n": 3, "max_tokens": 12}
    async with both_workers(FOLDER) as (one, other):
        prompt = prompt_of(200)
        answers = await together([each.ask(prompt, local=local, **params) for each in (one, other) for local in (0, 1)])
        assert all(answer.tokens == answers[0].tokens for answer in answers)
        assert SamplingParams(**params).n == len(answers[0].tokens)
        for each in (one, other):
            await each.settled()


async def test_no_circle_of_workers_that_wait_for_each_other():
    """Pages of both are held by requests that wait for KV from the other: prompts are then computed where they are."""
    async with both_workers(FOLDER, num_pages=16, max_running=32) as pair:
        prompts = [prompt_of(250, seed) for seed in range(16)]
        answers = await together([pair[number % 2].ask(prompt) for number, prompt in enumerate(prompts)])
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == expected(prompt)
        for each in pair:
            await each.settled()


@pytest.mark.heavy
@pytest.mark.parametrize("number", range(6))
async def test_sequences_that_outgrow_the_pages_leave_prompts_for_the_other_worker_alone(number):
    """Both compute prompts in many steps for each other, beside sequences that grow until some must give way."""
    small = {"num_pages": 20, "page_size": 16, "max_running": 32, "max_batch_tokens": 16}
    async with both_workers(FOLDER, **small) as pair:
        prompts = [prompt_of(60 + 7 * (seed % 5), 100 * number + seed) for seed in range(24)]
        asked = [pair[n % 2].ask(prompt, local=n % 3 == 0, max_tokens=48) for n, prompt in enumerate(prompts)]
        answers = await together(asked)
        assert [answer.tokens for answer in answers] == [expected(prompt, 48) for prompt in prompts]
        assert all(each.decode.engine._scheduler.preemptions for each in pair)
        for each in pair:
            await each.settled()


@pytest.mark.parametrize("local", [False, True])
async def test_an_engine_that_stops_fails_what_decodes_there_and_delays_the_rest(local):
    """What it was to compute for the other worker is computed there; what it decodes is for the router to move."""
    prompt, rest = prompt_of(300), prompt_of(200, 5)
    async with both_workers(FOLDER) as (one, other):
        lost = asyncio.create_task(other.ask(rest, local=local, max_tokens=200))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(other.decode.engine.stop)
        async with asyncio.timeout(60):
            assert (await one.ask(prompt)).tokens == expected(prompt)
            with pytest.raises(KvrailError):
                await lost
        await one.settled()


async def test_a_worker_that_drains_ends_both_kinds_of_requests():
    prompt = prompt_of(300)
    async with both_workers(FOLDER) as (one, other):
        ours, theirs = (asyncio.create_task(each.ask(prompt, max_tokens=60)) for each in (one, other))
        await asyncio.sleep(0.2)
        one.decode.calls.drain()
        for answer in await together([ours, theirs]):
            assert answer.tokens == expected(prompt, 60)
        assert (await other.ask(prompt)).tokens == expected(prompt)  # computed here, or found cached
        for each in (one, other):
            await each.settled()
