"""Traces: what is read of a file, what is sent of it and when, and what is refused."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from kvrail.errors import ConfigError
from kvrail.tools.bench.load import Range, load_of_trace, requests_of
from kvrail.tools.bench.trace import Request, Trace, read_trace

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    {"timestamp": 4500, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 9000, "input_length": 700, "output_length": 9, "hash_ids": [0, 3]},
]
OURS = [
    {"arrival": 0.5, "prompt_tokens": 30, "output_tokens": 2, "prefix": 7, "prefix_tokens": 20, "key": "a"},
    {"arrival": 1.0, "prompt_tokens": 25, "output_tokens": 3, "prefix": 7, "prefix_tokens": 10},
    {"arrival": 2.5, "prompt_tokens": 25, "output_tokens": 4, "prefix": 8, "prefix_tokens": 20},
    {"arrival": 2.5, "prompt_tokens": 20, "output_tokens": 1, "prefix": None},
]


def written(folder, lines):
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def load(folder, lines, *, first=None, longest=None, **more):
    return load_of_trace(Trace.read(written(folder, lines), first=first, longest=longest), **({"vocab": 50} | more))


def prompts(load):
    return [json.loads(request.body)["prompt"] for request in requests_of(load, "tiny")]


def alike(one, other):
    """How many tokens two prompts begin with alike."""
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), len(one))


def test_equal_blocks_are_equal_tokens_and_others_are_not(tmp_path):
    first, second, third, last = found = prompts(load(tmp_path, MOONCAKE, vocab=10**6))
    assert [len(prompt) for prompt in found] == [1200, 1024, 1536, 700]
    assert first[:1024] == second and third[:1200] == first  # a block that is cut short is its beginning
    assert alike(first, last) == 512
    blocks = [first[:512], first[512:1024], third[1024:], last[512:]]
    assert not any(set(one[:100]) == set(other[:100]) for one, other in pairwise(blocks))


def test_a_prefix_of_one_name_is_the_same_tokens_at_any_length(tmp_path):
    first, second, third, last = found = prompts(load(tmp_path, OURS, vocab=10**6))
    assert [len(prompt) for prompt in found] == [30, 25, 25, 20]
    assert alike(first, second) == 10
    assert alike(first, third) == alike(third, last) == alike(first, last) == 0


def test_what_the_blocks_of_a_line_do_not_cover_no_other_has(tmp_path):
    short = [MOONCAKE[0] | {"hash_ids": [0]}] * 2
    assert alike(*prompts(load(tmp_path, short, vocab=10**6))) == 512


def test_what_requests_share_is_counted_from_their_names(tmp_path):
    assert load(tmp_path, MOONCAKE).shared_tokens == 1024 + 1536 + 512
    assert load(tmp_path, OURS).shared_tokens == 10
    assert replace(load(tmp_path, OURS), trace=None, prefixes=2, prefix_tokens=3).shared_tokens == 4 * 3


def test_ids_are_below_vocab_and_a_seed_names_them(tmp_path):
    whole = load(tmp_path, MOONCAKE)
    assert {token for prompt in prompts(whole) for token in prompt} == set(range(50))
    assert prompts(whole) == prompts(replace(whole, speed=3.0))
    assert alike(prompts(whole)[0][:512], prompts(replace(whole, seed=1))[0]) < 512


def test_arrivals_outputs_and_seeds(tmp_path):
    made = list(requests_of(load(tmp_path, MOONCAKE, speed=2.0, seed=10), "tiny"))
    assert [request.arrival for request in made] == [0.0, 0.0, 0.75, 3.0]
    assert [request.output_tokens for request in made] == [5, 1, 7, 9]
    bodies = [json.loads(request.body) for request in made]
    assert [(body["max_tokens"], body["seed"], body["ignore_eos"], body["temperature"]) for body in bodies] == [
        (5, 10, True, 1),
        (1, 11, True, 1),
        (7, 12, True, 1),
        (9, 13, True, 1),
    ]
    turned = load(tmp_path, [OURS[2], OURS[0]])
    assert [(each.arrival, each.output_tokens) for each in requests_of(turned, "tiny")] == [(0.0, 2), (2.0, 4)]


def test_the_longest_are_left_out_of_the_first(tmp_path):
    found = load(tmp_path, MOONCAKE, longest=1205)
    assert [request.output_tokens for request in requests_of(found, "tiny")] == [5, 1, 9]
    assert (found.trace.left_out, found.requests, found.prompt, found.output) == (1, 3, Range(700, 1200), Range(1, 9))
    first = load(tmp_path, MOONCAKE, longest=1204, first=3)
    assert (first.trace.left_out, [request.output_tokens for request in requests_of(first, "tiny")]) == (2, [1])


def test_a_load_of_a_trace_in_words_and_as_settings(tmp_path):
    found = load(tmp_path, MOONCAKE, speed=0.5, sampling="greedy")
    assert str(found) == "700–1,536 in, 1–9 out, trace.jsonl at speed 0.5, 4 requests, greedy"
    found = load(tmp_path, MOONCAKE, longest=1205)
    left_out = "trace.jsonl (1 of more than 1,205 tokens left out)"
    assert str(found) == f"700–1,200 in, 1–9 out, {left_out} at speed 1, 3 requests, sampled"
    told = found.settings()
    assert told["trace"] == {"name": "trace.jsonl", "longest": 1205, "left_out": 1}
    assert (told["speed"], told["prompt"], json.loads(json.dumps(told))["vocab"]) == (
        1.0,
        {"least": 700, "most": 1200},
        50,
    )


def test_both_forms(tmp_path):
    assert read_trace(written(tmp_path, ["", OURS[0], OURS[3]])) == [
        Request(0.5, 30, 2, 7, 20, "a"),
        Request(2.5, 20, 1),
    ]
    assert read_trace(written(tmp_path, MOONCAKE[:1])) == [Request(3.0, 1200, 5, blocks=(0, 1, 2))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "this is no JSON: Expecting property name"),
        ("[1]", "this is no JSON object"),
        (OURS[0] | {"prefx": 1}, "prefx is unknown; a line has arrival, "),
        (OURS[0] | {"arrival": True}, "arrival has to be a number, at least 0, not true"),
        (OURS[0] | {"arrival": -1}, "arrival has to be a number, at least 0, not -1"),
        (OURS[0] | {"arrival": float("nan")}, "arrival has to be a number, at least 0, not NaN"),
        (OURS[0] | {"prompt_tokens": 0}, "prompt_tokens has to be a whole number, at least 1, not 0"),
        (OURS[0] | {"prefix": "a"}, 'prefix has to be a whole number, at least 0, not "a"'),
        (OURS[0] | {"prefix_tokens": 31}, "prefix_tokens is 31, more than the 30 of prompt_tokens"),
        ({"arrival": 1, "prompt_tokens": 3}, "output_tokens has to be a whole number, at least 1, not null"),
        (MOONCAKE[0] | {"timestamp": "0"}, 'timestamp has to be a number, at least 0, not "0"'),
        (MOONCAKE[0] | {"input_length": 2.5}, "input_length has to be a whole number, at least 1, not 2.5"),
        (MOONCAKE[0] | {"output_length": True}, "output_length has to be a whole number, at least 1, not true"),
        (MOONCAKE[0] | {"hash_ids": [1, "b"]}, 'hash_ids has to be a list of whole numbers, not [1, "b"]'),
        (
            {"timestamp": 1, "input_length": 2, "output_length": 3},
            "hash_ids has to be a list of whole numbers, not null",
        ),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, line, message):
    path = written(tmp_path, [OURS[1], line])
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 2: {message}")


def test_a_trace_without_requests_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trace\.jsonl has no request to send$"):
        Trace.read(written(tmp_path, [""]))
    with pytest.raises(ConfigError, match=r"has no request to send; all 4 have more than 700 tokens$"):
        Trace.read(written(tmp_path, MOONCAKE), longest=700)
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: No such file or directory$"):
        Trace.read(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes cannot be read: 'utf-8' codec can't decode"):
        Trace.read(tmp_path / "bytes")
