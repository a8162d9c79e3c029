"""Requests of every kind at once over a small pool: each gets the answer that it gets alone, and nothing is leaked.

A mix is an engine as it is, only the model replaced, of some setting: pages plain, closed without loss or with loss, or
plain under captured steps; a pool that holds one request or five; any chunks, places, drafts, steps ahead. Requests
of any sampling parameters come as they like: computed here, sent by another worker (coarse, in parts, twice, never, not
finite), computed for another, begun elsewhere. Clients leave, steps break. Compared are tokens, text, log probabilities
and ends; the pages that others take; the drafts that were told; the events of the prefix cache; the pages that are held
when all is over.

`make test-mixes` runs a thousand. The number that a failure begins with runs that mix alone: KVRAIL_MIX=17 pytest ...
"""

import functools
import os

import pytest

from tests.engine.captured_machine import without_cuda
from tests.engine.mixes.mix import FORMS, Mix, Tally

ONE = os.environ.get("KVRAIL_MIX")
SEEDS = [int(ONE)] if ONE is not None else list(range(int(os.environ.get("KVRAIL_MIXES", "40"))))

run = functools.cache(lambda seed: Mix(seed).run())


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_request_gets_the_answer_that_it_gets_alone(seed: int) -> None:
    run(seed)


@pytest.mark.parametrize("form", sorted(set(FORMS)))
def test_mixes_are_mixed(form: str) -> None:
    """Of each form requests of all kinds come, sequences are preempted, drafts confirmed and withdrawn."""
    tallies: list[Tally] = [run(seed) for seed in range(40) if FORMS[seed % len(FORMS)] == form]
    assert set().union(*(tally.kinds for tally in tallies)) == {"local", "prefill", "remote", "resumed"}
    assert sum(tally.preempted for tally in tallies) > 0
    assert 0 < sum(tally.accepted for tally in tallies) < sum(tally.proposed for tally in tallies)
