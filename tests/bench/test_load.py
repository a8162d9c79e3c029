"""Loads: the same for the same seed, as long as asked for, and arriving as a Poisson process does."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from kvrail.tools.bench.load import Load, Range, requests_of

LOAD = Load(requests=2000, rate=16.0, prompt=Range(5, 14), output=Range(3, 7), vocab=50, seed=3)


def uniform(counts):
    """Whether Pearson's statistic stays below 33, which it exceeds once in 8,000 times with 9 degrees of freedom."""
    mean = sum(counts) / len(counts)
    return sum((count - mean) ** 2 / mean for count in counts) < 33


def made(load):
    found = list(requests_of(load, "tiny"))
    return found, [json.loads(request.body) for request in found]


def test_a_seed_repeats_a_load_and_another_one_does_not():
    assert made(LOAD) == made(LOAD)
    (here, bodies), (there, others) = made(LOAD), made(replace(LOAD, seed=4))
    assert [request.arrival for request in here] != [request.arrival for request in there]
    assert [body["prompt"] for body in bodies] != [body["prompt"] for body in others]


def test_arrivals_do_not_change_what_is_asked():
    assert made(LOAD)[1] == made(replace(LOAD, rate=0.0, streams=4))[1]


def test_lengths_are_uniform_and_include_both_ends():
    requests, bodies = made(LOAD)
    for found, wanted in (
        ([len(body["prompt"]) for body in bodies], range(5, 15)),
        ([body["max_tokens"] for body in bodies], range(3, 8)),
    ):
        counts = Counter(found)
        assert set(counts) == set(wanted)
        assert uniform(counts.values())
    assert [request.output_tokens for request in requests] == [body["max_tokens"] for body in bodies]
    assert {token for body in bodies for token in body["prompt"]} == set(range(50))


def test_gaps_between_arrivals_are_exponential_and_the_rate_is_exact():
    moments = [request.arrival for request in made(LOAD)[0]]
    gaps = [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]
    assert moments[-1] == pytest.approx(2000 / 16)
    shares = [1 - math.exp(-16 * gap) for gap in sorted(gaps)]
    distance = max(abs(share - place / 2000) for place, share in enumerate(shares))
    assert distance < 1.95 / math.sqrt(2000)  # Kolmogorov and Smirnov: exceeded once in 1,000 times


def test_streams_have_no_arrivals():
    assert {request.arrival for request in made(replace(LOAD, rate=0.0, streams=4))[0]} == {0.0}


def test_each_prompt_begins_with_one_of_the_prefixes():
    _, bodies = made(replace(LOAD, prefixes=4, prefix_tokens=8))
    prefixes = Counter(tuple(body["prompt"][:8]) for body in bodies)
    assert len(prefixes) == 4
    assert uniform(prefixes.values())
    assert {len(body["prompt"]) for body in bodies} == set(range(13, 23))
    own = [tuple(body["prompt"][8:]) for body in bodies]
    assert len(set(own)) == len(own)


def test_requests_are_sampled_with_seeds_of_their_own_or_greedy():
    _, bodies = made(LOAD)
    assert len({body["seed"] for body in bodies}) == len(bodies)
    assert {body["temperature"] for body in bodies} == {1}
    assert {body["temperature"] for body in made(replace(LOAD, sampling="greedy"))[1]} == {0}
    assert {(body["top_k"], body["top_p"]) for body in made(replace(LOAD, sampling="filtered"))[1]} == {(20, 0.95)}
    for name, value in {"model": "tiny", "ignore_eos": True, "stream": True}.items():
        assert all(body[name] == value for body in bodies)
    assert bodies[0]["stream_options"] == {"include_usage": True}


def test_a_load_in_words():
    assert str(LOAD) == "5–14 in, 3–7 out, 16 requests/s, 2000 requests, sampled"
    closed = replace(
        LOAD, rate=0.0, streams=8, prompt=Range(256, 256), prefixes=8, prefix_tokens=3072, sampling="greedy"
    )
    assert str(closed) == "8 prefixes of 3,072 + 256 in, 3–7 out, 8 streams, 2000 requests, greedy"
