"""Workers killed outright while they work: the client's stream goes on as if nothing had happened."""

import re

import pytest

from tests.e2e.processes import Processes
from tests.models import kv_gib, tiny_model

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 400, "temperature": 0.7, "seed": 3, "ignore_eos": True}
BRIEF = {**BODY, "max_tokens": 40}
"""Where what befalls the cluster comes before the first token."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    model = tiny_model("llama")
    flags = ("--kv-dtype", "float32", "--kv-memory-gib", str(kv_gib(model, 64, "float32")), "--no-prefix-cache")
    started = Processes(tmp_path_factory.mktemp("lost"), model, *flags, decodes=3)
    yield started
    started.close()


def prefilled_by(cluster):
    return cluster.ask({**BODY, "max_tokens": 2})["usage"]["kvrail"]["prefill_worker"]


@pytest.fixture(scope="module")
def whole(cluster):
    """What a client gets where all live."""
    return cluster.stream(BODY)


def test_a_grammar_goes_on_where_it_was(cluster):
    pattern = "([a-c]{3}[0-9]){100}"
    body = {**BODY, "structured_outputs": {"regex": pattern}, "ignore_eos": False}
    whole = cluster.stream(body)
    assert len(whole) > 40 and re.fullmatch(r"([a-c]{3}[0-9])*[a-c]{0,3}", whole)
    assert cluster.stream(body, after=40, then=lambda: cluster.kill(cluster.busy_decode())) == whole


def test_a_killed_decode_worker_is_not_noticed(cluster, whole):
    """Two decode workers are left by the test before."""
    assert cluster.stream(BODY, after=40, then=lambda: cluster.kill(cluster.busy_decode())) == whole
    assert whole.startswith(cluster.stream(BRIEF))
    assert sorted(cluster.states()[address] for address in cluster.decodes) == ["down", "down", "healthy"]


def test_killed_prefill_workers_are_not_noticed(cluster):
    """One decode worker is left by the test before."""
    whole = cluster.stream(BRIEF)
    assert prefilled_by(cluster) in cluster.prefills
    cluster.kill(prefilled_by(cluster))
    assert cluster.stream(BRIEF) == whole
    cluster.kill(prefilled_by(cluster))
    assert cluster.stream(BRIEF) == whole
    assert prefilled_by(cluster) is None
