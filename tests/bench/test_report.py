"""Figures of runs whose latencies are known."""

import random
from dataclasses import replace

import numpy as np
import pytest

from kvrail.tools.bench.answers import Answer, Failure
from kvrail.tools.bench.load import Load, Range
from kvrail.tools.bench.report import figures, percentile, table
from kvrail.tools.bench.run import Run

LOAD = Load(requests=4, streams=2, prompt=Range(5, 5), output=Range(3, 3), vocab=50)


def answer(ttft, *gaps, tokens=None, **more):
    counts = {"prompt_tokens": 5, "completion_tokens": tokens or len(gaps) + 1}
    return Answer(ttft, list(gaps), "", counts | more)


def run(*found, seconds=2.0, load=LOAD):
    made = Run(load, seconds, 0.5)
    for each in found:
        made.add(each)
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 99, 100, 101])
def test_percentiles_are_those_of_numpy(size):
    draws = random.Random(size)
    values = [draws.random() for _ in range(size)]
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_figures_are_those_of_numpy():
    draws = random.Random(1)
    answers = [answer(draws.random(), *(draws.random() for _ in range(length))) for length in (0, 1, 2, 7, 30)]
    told = figures(run(*answers), {})
    firsts = [each.ttft for each in answers]
    rest = [sum(each.gaps) for each in answers]
    per_token = [total / len(each.gaps) for total, each in zip(rest, answers, strict=True) if each.gaps]
    values = {
        "ttft": firsts,
        "tpot": per_token,
        "itl": [gap for each in answers for gap in each.gaps],
        "e2el": np.add(firsts, rest),
    }
    for name, found in values.items():
        assert told[f"mean_{name}_ms"] == pytest.approx(1e3 * np.mean(found))
        assert told[f"median_{name}_ms"] == pytest.approx(1e3 * np.median(found))
        assert told[f"p99_{name}_ms"] == pytest.approx(1e3 * np.percentile(found, 99))
        assert told[f"max_{name}_ms"] == pytest.approx(1e3 * np.max(found))
    assert told["median_first_gap_ms"] == pytest.approx(1e3 * np.median([each.gaps[0] for each in answers[1:]]))


def test_rates_count_answers_alone():
    told = figures(run(answer(0.1, 0.2), answer(0.1, 0.2, 0.2), Failure("HTTP 500", "boom")), {})
    assert (told["completed"], told["failed"], told["duration"]) == (2, 1, 2.0)
    assert (told["request_throughput"], told["output_throughput"]) == (1.0, 2.5)
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (10, 5)
    assert (told["client_cpu_share"], told["request_goodput"]) == (0.25, None)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 250}, 3),  # a limit may be reached
        ({"ttft": 249}, 2),
        ({"tpot": 15}, 2),
        ({"tpot": 14.9}, 1),  # one token takes no time after itself
        ({"e2el": 300}, 3),
        ({"ttft": 250, "tpot": 16}, 2),
        ({"ttft": 250, "tpot": 16, "e2el": 100}, 1),
    ],
)
def test_goodput_keeps_all_limits(limits, good):
    answers = [answer(0.25, 0.01, 0.02), answer(0.1, 0.5), answer(0.3), answer(0.0625, 0.0155)]
    assert figures(run(*answers), limits)["request_goodput"] == good / 2.0


def test_failures_are_counted_by_kind_with_an_example():
    failures = [Failure("HTTP 429", "wait"), Failure("broke off", "lost"), Failure("HTTP 429", "wait longer")]
    told = figures(run(*failures), {"ttft": 1.0})
    assert [(each["kind"], each["count"]) for each in told["failures"]] == [("HTTP 429", 2), ("broke off", 1)]
    assert told["median_ttft_ms"] is None and told["request_goodput"] == 0.0
    text = table(told, {"ttft": 1.0})
    assert "2 × HTTP 429, for example: wait" in text and "1 × broke off, for example: lost" in text


@pytest.mark.parametrize(
    ("cached", "prefix_tokens", "told"),
    [(10, 0, ""), (11, 0, "11%"), (100, 0, "100%"), (90, 80, ""), (96, 80, "80%"), (80, 80, "")],
)
def test_prompts_that_the_server_knew_are_warned_of(cached, prefix_tokens, told):
    load = replace(LOAD, prefixes=bool(prefix_tokens), prefix_tokens=prefix_tokens)
    known = answer(0.1, 0.1, prompt_tokens=100, prompt_tokens_details={"cached_tokens": cached})
    row = figures(run(known, load=load), {})
    assert [each.startswith(f"{told} of") for each in row["warnings"]] == [True] * bool(told)
    assert ("warning: " in table(row, {})) == bool(told)


def test_what_crossed_is_told_where_the_server_tells_it():
    def crossed(codec, raw, sent, seconds):
        return {"codec": codec, "kv_raw_bytes": raw, "kv_bytes": sent, "stage_seconds": {"prefill": seconds}}

    told = figures(
        run(
            answer(0.1, kvrail=crossed("raw", 9, 9, 0.1)),
            answer(0.1, kvrail=crossed("splitzip", 9, 6, 0.3)),
            answer(0.1, kvrail=crossed(None, 0, 0, 0.2), prompt_tokens_details={"cached_tokens": 4}),
        ),
        {},
    )
    assert told["codecs"] == {"raw": 1, "splitzip": 1, "none": 1}
    assert (told["kv_raw_bytes"], told["kv_bytes"], told["cached_input_tokens"]) == (18, 15, 4)
    assert told["stage_median_ms"] == {"prefill": pytest.approx(200.0)}
    assert "codecs: raw 1, splitzip 1, none 1; 15 bytes crossed" in table(told, {})
    assert "codecs" not in figures(run(answer(0.1)), {})
