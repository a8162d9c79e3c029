"""What the simulator says of the policies that serve, and the forms of traces that it reads."""

import json

import pytest

from benchmarks.simulator.__main__ import table
from benchmarks.simulator.cluster import Simulation
from benchmarks.simulator.trace import Shape, generate, pages, write_trace
from benchmarks.simulator.workers import Speed
from kvrail.services.router.fleet.policy import POLICIES
from kvrail.tools.bench.trace import Request, read_trace

RATE = 0.7 * 8 * 40_000 / 2200


@pytest.fixture(scope="module")
def means():
    """Mean times to the first token, by share of prompts that begin alike, and policy."""
    found = {}
    for share in (0.8, 0.0):
        trace = list(generate(Shape(1200, RATE, share=share)))
        for policy in POLICIES:
            outcome = Simulation(policy, 8, pages=5300).run(trace)
            assert all(job.end >= job.first_token > job.arrival for job in outcome.jobs)
            assert policy in table([outcome])
            found[share, policy] = outcome.mean
    return found


def test_shared_prefixes_are_worth_a_third_of_the_wait(means):
    assert means[0.8, "prefix-aware"] <= 0.7 * means[0.8, "round-robin"]
    assert all(means[0.8, "prefix-aware"] < means[0.8, policy] for policy in POLICIES if policy != "prefix-aware")


def test_64_streams_of_one_client_wait_for_no_place():
    """Each first token comes as soon as its prompt can be computed, long before the first answer ends."""
    trace = [Request(0.0, 512, 1000, key="alone") for _ in range(64)]
    outcome = Simulation("prefix-aware", 1, pages=5300, prefill_wait_s=0).run(trace)
    computed_s = sum(request.prompt_tokens for request in trace) * Speed().prefill_s
    assert max(outcome.times) <= computed_s + 0.1 < min(job.end for job in outcome.jobs)


def test_nothing_is_lost_where_nothing_is_shared(means):
    assert means[0.0, "prefix-aware"] <= 1.02 * means[0.0, "round-robin"]


def test_a_hot_prefix_is_spread():
    """One prefix for all: as much as one worker could not do is done by several."""
    trace = list(generate(Shape(800, 8 * 40_000 / 1000, share=1.0, prefixes=1, own_tokens=800)))
    outcome = Simulation("prefix-aware", 8, pages=5300).run(trace)
    assert outcome.imbalance < 1.5
    assert outcome.hit_rate > 0.5


def test_decode_workers_help_where_prompts_come_faster_than_they_are_computed():
    """And nowhere else; what a decode worker computes beside the others costs these less than the wait was."""
    more, usual = (list(generate(Shape(1200, rate * 8 * 40_000 / 2200, share=0.0))) for rate in (1.1, 0.7))
    alone = Simulation("prefix-aware", 8, pages=5300, prefill_wait_s=0).run(more)
    helped = Simulation("prefix-aware", 8, pages=5300).run(more)
    assert (alone.helped, Simulation("prefix-aware", 8, pages=5300).run(usual).helped) == (0, 0)
    assert helped.helped > 0
    assert helped.quantile(0.99) < 0.75 < alone.quantile(0.99)
    ends = [sum(job.end - job.arrival for job in outcome.jobs) for outcome in (helped, alone)]
    assert ends[0] < ends[1]


def test_ours_and_mooncakes_form(tmp_path):
    requests = list(generate(Shape(50, 10.0)))
    write_trace(tmp_path / "ours.jsonl", requests)
    assert read_trace(tmp_path / "ours.jsonl") == requests
    lines = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 4]},
    ]
    (tmp_path / "theirs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    one, other = read_trace(tmp_path / "theirs.jsonl")
    assert (other.arrival, other.prompt_tokens) == (1.5, 1100)
    ours, others = pages(one, 0, 64), pages(other, 1, 64)
    assert (len(ours), len(others)) == (18, 17)
    assert ours[:16] == others[:16] and ours[16] != others[16]  # 1,024 tokens are alike


def test_pages_are_alike_as_far_as_prompts_are():
    one, other = Request(0, 300, 1, prefix=3, prefix_tokens=200), Request(0, 400, 1, prefix=3, prefix_tokens=200)
    first, second = pages(one, 0, 64), pages(other, 1, 64)
    assert first[:3] == second[:3] and first[3] != second[3]
    assert len(set(first + second)) == 7
    assert not set(pages(Request(0, 300, 1), 2, 64)) & set(pages(Request(0, 300, 1), 3, 64))
