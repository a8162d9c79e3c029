"""A first stage that is broken costs drafts, never the output."""

import random

import pytest

from codec import registry
from tests.cluster.cluster import cluster
from tests.cluster.staged import held_bytes
from tests.progressive.anchors import broken_anchors  # noqa: F401  a fixture
from tests.progressive.gates import Gates
from tests.progressive.test_same_output import DECODE, DEMO, SHARED, Tally, compare, prompts

PROMPTS = 2


@pytest.mark.parametrize(("codec", "least", "most"), [("all-noise", 0.0, 0.1), ("half-right", 0.04, 0.8)])
@pytest.mark.usefixtures("broken_anchors")
async def test_the_output_is_raws(monkeypatch, codec, least, most):
    assert registry.get(codec).exact
    tally, rng, gates = Tally(), random.Random(2), Gates(monkeypatch)
    async with cluster(DEMO, "inproc", decode=DECODE, **SHARED) as c:
        for prompt in prompts(PROMPTS):
            await compare(c, gates, prompt[:600], [codec], tally, rng)
        await c.settled()
        assert not held_bytes(c)
    assert not tally.differences, "\n".join(tally.differences)
    assert tally.staged == 2 * PROMPTS and tally.proposed > 20
    assert least <= tally.accepted / tally.proposed <= most
