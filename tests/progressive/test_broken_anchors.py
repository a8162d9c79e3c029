"""A first stage that is broken costs drafts, never the output."""

import asyncio
import random

import pytest

from kvrail.codec import registry
from kvrail.engine.schedule.tracker import RequestTracker
from kvrail.text import load_tokenizer
from tests.cluster.cluster import cluster
from tests.cluster.staged import held_bytes, hold_later_stages
from tests.progressive.anchors import broken_anchors  # noqa: F401  a fixture
from tests.progressive.gates import Gates
from tests.progressive.test_same_output import DECODE, DEMO, SHARED, Tally, compare

PROMPTS = 1


def prompts(count):
    """Of the held-out text alone, which stays as it is: how many drafts happen to be right depends on the text."""
    ids = load_tokenizer(str(DEMO)).encode((DEMO / "heldout.txt").read_text(), add_special_tokens=False)
    return [ids[1000 * number : 1000 * number + 600] for number in range(count)]


class Tallies(dict[str, Tally]):
    """One for each codec."""

    def add(self, name, *answer):
        self[name].add(name, *answer)


@pytest.mark.usefixtures("broken_anchors")
async def test_the_output_is_raws(monkeypatch):
    shares = {"all-noise": (0.0, 0.1), "half-right": (0.04, 0.8)}  # of drafts that are right
    tallies, rng, gates = Tallies((name, Tally()) for name in shares), random.Random(2), Gates(monkeypatch)
    assert all(registry.get(name).exact for name in shares)
    async with cluster(DEMO, "inproc", decode=DECODE, **SHARED) as c:
        for prompt in prompts(PROMPTS):
            await compare(c, c, gates, prompt, list(shares), tallies, rng)
        await c.settled()
        assert not held_bytes(c)
    for name, (least, most) in shares.items():
        tally = tallies[name]
        assert not tally.differences, "\n".join(tally.differences)
        assert tally.staged == 2 * PROMPTS and tally.proposed > 20
        assert least <= tally.accepted / tally.proposed <= most


@pytest.mark.usefixtures("broken_anchors")
async def test_where_no_draft_can_be_made_the_request_waits_for_its_kv(monkeypatch):
    refused, loop = asyncio.Event(), asyncio.get_running_loop()
    drop = RequestTracker.drop_drafts

    def dropped(tracker, request_id):
        loop.call_soon_threadsafe(refused.set)
        return drop(tracker, request_id)

    monkeypatch.setattr(RequestTracker, "drop_drafts", dropped)
    hold_later_stages(monkeypatch, refused.wait)
    async with cluster(DEMO, "inproc", decode=DECODE, **SHARED) as c:
        (prompt,) = prompts(1)
        answer = await c.ask(prompt[:100], codec="no-numbers", max_tokens=8)
        raw = await c.ask(prompt[:100], codec="raw", max_tokens=8)
        await c.settled()
    assert answer.tokens == raw.tokens and answer.summary.drafts_proposed == 0
