"""What a request may ask of a transfer in stages, and what it is spared: lost workers, loss, a choice of codec."""

import asyncio

import pytest

import kvrail.services.decode.choice
from kvrail.codec import registry
from kvrail.errors import InvalidRequestError
from kvrail.services.decode.choice import FIRST_ACCEPTANCE
from tests.cluster.cluster import cluster
from tests.cluster.halves import staged_codecs  # noqa: F401  a fixture
from tests.cluster.staged import SHARED, Dying, drafted, held_bytes, hold_later_stages, until_drafted
from tests.cluster.test_equality import prompt_of
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("staged_codecs")


@pytest.fixture
def llama():
    return tiny_model("llama")


def settled(told, expected):
    """Where drafts began, those confirmed and how many there were, each time they were settled; checked on the way."""
    output, drafts, found = [], [], []
    for reply in told.news:
        if reply.HasField("drafted"):
            assert reply.drafted.position == len(output) + len(drafts)
            drafts += reply.drafted.token_ids
        elif reply.HasField("verified"):
            verified = reply.verified
            assert (verified.position, verified.proposed) == (len(output), len(drafts))
            found.append((verified.position, drafts[: verified.accepted], len(drafts)))
            drafts = []
        else:
            output += reply.token_ids
    assert output == expected.tokens[0] and not drafts
    for position, confirmed, _ in found:
        assert output[position : position + len(confirmed)] == confirmed
    return found


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
@pytest.mark.parametrize("after", [0, 3])
async def test_an_alternate_takes_over_between_stages(llama, monkeypatch, transport, after):
    prompt = prompt_of(300)
    async with cluster(llama, transport, prefill_count=2, prefix_cache=False, **SHARED) as c:
        expected = await c.ask(prompt, local=True, temperature=0.7, seed=3, max_tokens=32)
        dying = Dying(monkeypatch, after, prompt)
        hold_later_stages(monkeypatch, lambda: until_drafted(c.decode, 4, dying))
        answer = await c.ask(prompt, codec="halves", temperature=0.7, seed=3, max_tokens=32, provisional=True)
        assert answer.tokens == expected.tokens and answer.text == expected.text
        assert dying.deaths == 1 and c.decode.meters.transfers.fallbacks["alternate"].value == 1
        assert answer.summary.prefill_worker == list(c.prefills)[1]
        (first, confirmed, proposed), (again, *_) = settled(answer, expected)
        assert first == again == 1 and not confirmed and proposed >= 4
        await c.settled()
        assert not held_bytes(c)


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
async def test_without_an_alternate_the_prompt_is_computed_here(llama, monkeypatch, transport):
    prompt = prompt_of(300)
    async with cluster(llama, transport, prefill_count=2, prefix_cache=False, **SHARED) as c:
        expected = await c.ask(prompt, local=True, max_tokens=32)
        dying = Dying(monkeypatch, 1, prompt, once=False)
        hold_later_stages(monkeypatch, lambda: until_drafted(c.decode, 2, dying))
        answer = await c.ask(prompt, codec="halves", max_tokens=32)
        assert answer.tokens == expected.tokens and not answer.summary.prefill_worker
        assert dying.deaths == 2 and c.decode.meters.transfers.fallbacks["local"].value == 1
        # Drafts were made, and none was verified: that says nothing of how many are right.
        assert not answer.summary.drafts_proposed and c.fetcher.chooser._acceptance == FIRST_ACCEPTANCE
        await c.settled()
        assert not held_bytes(c)


@pytest.mark.parametrize("codec", ["halves", "noise"])
async def test_provisional_replies_add_up_to_the_output(llama, monkeypatch, codec):
    """A caller that believes drafts until they are settled, and settles them, has what a default caller has."""
    gate = asyncio.Event()
    hold_later_stages(monkeypatch, gate.wait)
    asked = {"codec": codec, "max_tokens": 40, "temperature": 0.6, "seed": 4}
    async with cluster(llama, "tcp", prefix_cache=False, decode={"max_drafts": 10}, **SHARED) as c:
        told = asyncio.create_task(c.ask(prompt_of(300), provisional=True, **asked))
        await drafted(c.decode, 10)
        gate.set()
        told = await told
        gate.clear()
        plain = asyncio.create_task(c.ask(prompt_of(300), **asked))
        await drafted(c.decode, 10)
        gate.set()
        plain = await plain
        await c.settled()
    assert plain.summary.drafts_proposed == 10
    assert not any(reply.HasField("drafted") or reply.HasField("verified") for reply in plain.news)
    assert told.tokens == plain.tokens and told.text == plain.text
    ((position, confirmed, proposed),) = settled(told, plain)
    assert (position, proposed) == (1, 10)
    assert (told.summary.drafts_proposed, told.summary.drafts_accepted) == (10, len(confirmed))
    assert confirmed if codec == "halves" else len(confirmed) < 10


async def test_a_lossy_codec_needs_the_operators_leave(llama):
    prompt = prompt_of(300)
    async with cluster(llama, "tcp", prefix_cache=False, **SHARED) as c:
        with pytest.raises(InvalidRequestError, match=r"'lossy-halves' is lossy: .*--allow-lossy") as refused:
            await c.ask(prompt, codec="lossy-halves")
        assert refused.value.param == "codec"
        await c.settled()
    async with cluster(llama, "tcp", prefix_cache=False, decode={"allow_lossy": True}, **SHARED) as c:
        answer = await c.ask(prompt, codec="lossy-halves")
        assert answer.summary.lossy and answer.summary.codec == "lossy-halves"
        assert not (await c.ask(prompt, codec="halves")).summary.lossy
        assert c.decode.meters.transfers.lossy_requests.value == 1
        await c.settled()


async def test_auto_chooses_by_what_it_measured_and_says_why(llama, monkeypatch):
    offered = ("raw", "splitzip-channel", "halves")
    monkeypatch.setattr(registry, "names", lambda: offered)
    for least in ("LEAST_SAMPLE_BYTES", "LEAST_PAYLOAD_BYTES"):
        monkeypatch.setattr(kvrail.services.decode.choice, least, 1000)
    prompt = prompt_of(700)
    async with cluster(llama, "tcp", prefix_cache=False, decode={"codec": "auto"}, **SHARED) as c:
        await c.fetcher.measure_codecs()
        expected = await c.ask(prompt, local=True)
        first = await c.ask(prompt)
        staged = await c.ask(prompt, codec="halves")
        second = await c.ask(prompt, codec="auto")
        assert first.tokens == second.tokens == expected.tokens
        assert first.summary.codec == "splitzip-channel" and "not been measured" in first.summary.codec_reason
        assert second.summary.codec in offered and "MB/s" in second.summary.codec_reason
        assert staged.tokens == expected.tokens and not staged.summary.codec_reason
        assert "auto" in (await c.client.get_status(timeout_s=5)).codecs
        await c.settled()
