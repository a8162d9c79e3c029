"""Workers of both forms of pages in one cluster: whatever each keeps, the same crosses and the same is said."""

import asyncio
import random

import pytest

from tests.cluster.cluster import cluster
from tests.cluster.halves import staged_codecs  # noqa: F401  a fixture
from tests.cluster.test_equality import prompt_of
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("staged_codecs")
SHARED = {"kv_dtype": "bfloat16", "num_pages": 60, "max_model_len": 1024, "max_running": 8}
LENGTHS = (64, 65, 300, 650)
CUTS = ((650, 63), (300, 64), (650, 200))
SAMPLED = {"temperature": 0.9, "seed": 5, "max_tokens": 70}


def folder():
    return tiny_model("llama", head_dim=64)


def forms(prefill, decode, **changes):
    return SHARED | {"prefill": {"kv_cache": prefill}, "decode": {"kv_cache": decode, **changes}}


async def said(c, codec="raw"):
    """What a cluster says: cold prompts, then some that begin as these did."""
    found = []
    for n, prompts in (
        (1, map(prompt_of, LENGTHS)),
        (3, [[*prompt_of(length), 7] for length in (64, 300)]),
        (1, [[*prompt_of(length)[:-cut], *prompt_of(90, seed=cut)] for length, cut in CUTS]),
    ):
        answers = await asyncio.gather(*(c.ask(prompt, codec=codec, n=n, **SAMPLED) for prompt in prompts))
        found += [answer.tokens for answer in answers]
    await c.settled()
    return found


@pytest.fixture(scope="module")
def known():
    return {}


async def plain(known):
    if not known:
        async with cluster(folder(), "inproc", **SHARED) as c:
            known["tokens"] = await said(c)
    return known["tokens"]


def closed(worker):
    return 0 if worker.engine._closer is None else worker.engine._closer.pages


@pytest.mark.parametrize(
    ("transport", "codec", "prefill", "decode"),
    [
        ("inproc", "halves", "lossless", "plain"),
        ("tcp", "splitzip", "plain", "lossless"),
        ("tcp", "raw", "lossless", "lossless"),
    ],
)
async def test_both_forms_serve_together(known, transport, codec, prefill, decode):
    async with cluster(folder(), transport, **forms(prefill, decode)) as c:
        assert await said(c, codec) == await plain(known)
        workers = (*c.prefills.values(), c.decode)
        assert [closed(worker) > 15 for worker in workers] == [form == "lossless" for form in (prefill, decode)]


async def test_closed_pages_are_sent(known):
    """The decode worker keeps none, so that what the prefill worker has cached crosses from closed pages."""
    async with cluster(folder(), **forms("lossless", "plain", prefix_cache=False)) as c:
        (prefill,) = c.prefills.values()
        for _ in range(2):
            answer = await c.ask(prompt_of(650), codec="raw", **SAMPLED)
            assert answer.tokens == (await plain(known))[3] and not answer.summary.cached_tokens
            assert closed(prefill) == 10
            await c.settled()


async def test_pages_held_by_the_decode_worker_do_not_cross_again(known):
    async with cluster(folder(), **forms("lossless", "lossless")) as c:
        for _ in range(2):
            answer = await c.ask(prompt_of(650), **SAMPLED)
            assert answer.tokens == (await plain(known))[3]
        assert answer.summary.cached_tokens == 640
        await c.settled()


async def test_many_at_once_over_few_pages():
    """More than the pages hold; every fourth client leaves early."""
    rng = random.Random(1)
    base = prompt_of(400)
    asked = [[*base[: rng.randrange(400)], *prompt_of(rng.randrange(1, 300), seed=number)] for number in range(32)]

    async def ask(c, number, prompt):
        codec = ("raw", "halves")[number % 3 == 0]
        one = c.ask(prompt, codec=codec, local=number % 5 == 0, temperature=0.8, seed=number, n=1 + number % 2)
        if number % 4:
            return (await one).tokens
        task = asyncio.create_task(one)
        await asyncio.sleep(0.02 * number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    found = []
    for form in ("plain", "lossless"):
        async with cluster(folder(), **forms(form, form) | {"num_pages": 32, "max_model_len": 768}) as c:
            found.append(await asyncio.gather(*(ask(c, *each) for each in enumerate(asked))))
            await c.settled()
            assert form == "plain" or min(closed(worker) for worker in (c.decode, *c.prefills.values())) > 4
    assert found[0] == found[1]
