"""A decode worker whose pages lose bits: each answer is that of an LLM with such pages, whoever computed the prompt."""

import asyncio
import itertools

import pytest

from kvrail import LLM, SamplingParams
from kvrail.errors import WorkerUnavailableError
from tests.cluster.both import both_workers
from tests.cluster.cluster import cluster
from tests.cluster.halves import staged_codecs  # noqa: F401  a fixture
from tests.cluster.staged import on_send
from tests.cluster.test_equality import prompt_of
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("staged_codecs")
SHARED = {"kv_dtype": "bfloat16", "num_pages": 60, "max_model_len": 1024, "max_running": 8, "prefill_count": 2}
SAMPLED = {"temperature": 0.9, "max_tokens": 80}


def folder():
    return tiny_model("llama", head_dim=64)


def lossy(form="int4", **changes):
    return SHARED | {"decode": {"kv_cache": form, **changes}}


@pytest.fixture(scope="module")
def known():
    return said("int4", [(1, 1), (64, 1), (65, 3), (320, 3), (450, 1), (450, 3)])


def said(form, asked):
    """What an LLM says, by length and number of sequences."""
    options = {"device": "cpu", "dtype": "float32", "kv_dtype": "bfloat16"}
    options |= {"max_model_len": 1024, "kv_memory_gib": 0.05}
    with LLM(str(folder()), kv_cache=form, **options) as llm:
        results = llm.generate(
            [prompt_of(length) for length, _ in asked],
            [SamplingParams(seed=length, n=n, ignore_eos=True, **SAMPLED) for length, n in asked],
        )
    tokens = [{each.index: list(each.token_ids) for each in result.outputs} for result in results]
    return dict(zip(asked, tokens, strict=True))


async def test_answers_are_those_of_an_llm(known):
    """Twice at once: cold, then over what is cached, every third by the decode worker alone; some in two stages."""
    async with cluster(folder(), **lossy()) as c:
        for warm in (False, True):
            asked = [
                c.ask(prompt_of(length), codec=codec, local=warm and number % 3 == 0, n=n, seed=length, **SAMPLED)
                for number, ((length, n), codec) in enumerate(zip(known, itertools.cycle(("raw", "halves"))))
            ]
            for case, answer in zip(known, await asyncio.gather(*asked), strict=True):
                assert answer.tokens == known[case], (case, warm)
            await c.settled()
        again = await c.ask(prompt_of(450), codec="raw", seed=450, **SAMPLED)
        assert again.tokens == known[450, 1] and again.summary.cached_tokens >= 5 * 64
        assert c.decode.engine._closer.pages > 15


@pytest.mark.parametrize("form", ["kvcomp", "rot3"])
async def test_answers_over_other_pages_are_those_of_an_llm(form):
    known = said(form, [(65, 1), (450, 1)])
    async with cluster(folder(), **lossy(form)) as c:
        for (length, _), tokens in known.items():
            answer = await c.ask(prompt_of(length), codec="raw", seed=length, **SAMPLED)
            assert answer.tokens == tokens
        await c.settled()
        assert c.decode.engine._closer.pages > 3


@pytest.mark.parametrize("deaths", [1, 9])
async def test_a_prefill_worker_that_is_lost_changes_no_token(known, monkeypatch, deaths):
    """After some of the KV: another one sends the rest, or the decode worker computes a prompt that began cached."""
    sent = itertools.count()

    async def dying(sender, header, stage):
        if next(sent) % 3 == 2 and next(died) < deaths:
            raise WorkerUnavailableError("the worker died")

    died = itertools.count()
    frame = 64 * 2 * 2 * 64 * 2 * 3
    async with cluster(folder(), **lossy(), max_frame_bytes=frame, max_batch_tokens=128) as c:
        await c.ask(prompt_of(320), seed=320, **SAMPLED)
        on_send(monkeypatch, dying)
        asked = [c.ask(prompt_of(450), seed=450, n=n, **SAMPLED) for n in (1, 3)]
        for n, answer in zip((1, 3), await asyncio.gather(*asked), strict=True):
            assert answer.tokens == known[450, n]
        fallbacks = c.decode.meters.transfers.fallbacks
        assert fallbacks["alternate"].value and bool(fallbacks["local"].value) == (deaths > 1)
        await c.settled()


async def test_workers_of_both_roles_compute_for_each_other(known):
    """What one sends is exact, though it keeps the prompt closed once that was sent."""
    shared = {key: value for key, value in SHARED.items() if key != "prefill_count"}
    async with both_workers(folder(), kv_cache="int4", **shared | {"num_pages": 40}) as pair:
        for turn in range(2):
            asked = [
                pair[(number + turn) % 2].ask(prompt_of(length), seed=length, n=n, **SAMPLED)
                for number, (length, n) in enumerate(known)
            ]
            assert [answer.tokens for answer in await asyncio.gather(*asked)] == list(known.values())
        for each in pair:
            await each.settled()


@pytest.mark.parametrize("sent", [1, 70])
async def test_an_output_goes_on_elsewhere(known, sent):
    """What another worker of the form has said is taken up: the same tokens follow."""
    tokens = known[320, 3]
    async with cluster(folder(), **lossy()) as c:
        resumed = [(tokens[0][:sent], False), (tokens[1], True), (tokens[2][: sent + 3], False)]
        answer = await c.ask(prompt_of(320), resumed=resumed, seed=320, n=3, **SAMPLED)
        assert answer.tokens == {0: tokens[0][sent:], 2: tokens[2][sent + 3 :]}
        await c.settled()


async def test_a_request_for_exact_pages_is_refused():
    async with cluster(folder(), **lossy()) as c:
        assert (await c.ask(prompt_of(65), kv_cache="int4")).tokens
        with pytest.raises(WorkerUnavailableError, match="keeps KV pages as 'int4'"):
            await c.ask(prompt_of(65), kv_cache="plain")
