"""A cluster as it comes, asked over HTTP: what each codec carries, and how that shows."""

import json

import httpx
import pytest

from benchmarks.link import once_compiled
from kvrail.codec import registry
from tests.e2e.cluster import MODEL, lint, samples, started
from tests.forked import Forked

LEAST_RATIO = {
    "raw": 1.0,
    "splitzip": 1.30,
    "splitzip-channel": 1.38,
    "splitzip-progressive-ans": 1.44,
    "splitzip-ans": 1.45,
    "lynx-exact": 1.2,
}
COUNTED = ("raw", "splitzip", "splitzip-channel", "splitzip-ans")
"""Codecs of one stage that encode on a CPU: each has an escape for what does not fit."""
PROMPT = "A page of text about sockets, files and processes. " * 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started(tmp_path_factory, "--no-prefix-cache") as cluster:
        yield cluster


def ask(cluster, codec=None, prompt=PROMPT, max_tokens=16):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if codec is not None:
        body["kvrail"] = {"codec": codec}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def answers(cluster):
    """By exact codec, each asked for as soon as it is compiled: until then others serve. None: none was asked for."""

    def with_codec(codec):
        brief = PROMPT[: len(PROMPT) // 4]
        once_compiled(lambda: ask(cluster, codec, brief, 2).json(), lambda answer: answer["usage"]["kvrail"])
        return ask(cluster, codec).json()

    default = ask(cluster).json()
    return {None: default, **{name: with_codec(name) for name in registry.names() if registry.get(name).exact}}


def test_each_codec_gives_the_same_text_in_fewer_bytes(answers):
    assert len({answer["choices"][0]["text"] for answer in answers.values()} | {""}) == 2
    for codec, answer in answers.items():
        usage = answer["usage"]["kvrail"]
        assert usage["codec"] == (codec or "splitzip-channel")
        assert usage["kv_raw_bytes"] / usage["kv_bytes"] >= LEAST_RATIO[usage["codec"]], codec


def test_another_codec_is_refused_by_name(cluster):
    answer = ask(cluster, "zip")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "kvrail.codec")
    assert "'zip'" in error["message"] and "splitzip-channel" in error["message"]


def test_the_workers_say_what_their_codecs_did(cluster, answers):
    assert answers.keys() >= set(COUNTED)
    prefill, decode = (samples(cluster.metrics[f"{role}-0"]) for role in ("prefill", "decode"))

    def total(samples, name, codec, **labels):
        return sum(v for n, have, v in samples if n == name and have.items() >= {"codec": codec, **labels}.items())

    for codec in COUNTED:
        frames = total(prefill, "kvrail_kv_frames_total", codec, direction="sent")
        assert frames > 0 and total(prefill, "kvrail_kv_encode_seconds_count", codec) == frames
        assert total(decode, "kvrail_kv_decode_seconds_count", codec) == frames
        values = total(prefill, "kvrail_kv_encoded_values_total", codec)
        assert total(prefill, "kvrail_kv_raw_bytes_total", codec, direction="sent") == 2 * values > 0
        assert total(prefill, "kvrail_kv_escaped_values_total", codec) < 0.05 * values
        assert total(prefill, "kvrail_kv_raw_tensors_total", codec) == (2 * frames if codec == "raw" else 0)


@pytest.mark.usefixtures("answers")
def test_a_trace_tells_where_each_byte_went(cluster, tmp_path):
    path = tmp_path / "trace.json"
    flags = ["--url", cluster.url, "--codec", "splitzip-progressive-ans", "--max-tokens", "8", "--out", str(path)]
    traced, refused = tmp_path / "traced", tmp_path / "refused"
    assert Forked(["trace", *flags, PROMPT], traced).wait(60) == 0, traced.read_text()
    told = json.loads(path.read_text())
    usage, events = told["otherData"], told["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == ["decode worker", "prefill worker", "request"]
    spans = [event for event in events if event["ph"] == "X"]

    def total(process, track):
        return sum(e["args"]["bytes"] for e in spans if (processes[e["pid"]], e["cat"]) == (process, track))

    assert total("prefill worker", "encode") == usage["kv_raw_bytes"] > 0
    assert total("prefill worker", "send") == total("decode worker", "decode") == usage["kv_bytes"] > 0
    assert sum(e["args"]["tokens"] for e in spans if e["cat"] == "tokens") == 7
    (whole,) = (event for event in spans if event["cat"] == "whole")
    end = whole["ts"] + whole["dur"]
    assert sum(e["dur"] for e in spans if e["cat"] == "parts") == pytest.approx(end, rel=1e-3)
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= end + 2 for e in spans)
    assert {"prefill", "kv_wait", "draft", "decode"} <= {line.split()[0] for line in traced.read_text().splitlines()}
    assert Forked(["trace", *flags, PROMPT], refused).wait(60) == 2 and "exists; add --force" in refused.read_text()
    assert "trace" not in ask(cluster).json()["usage"]["kvrail"]


@pytest.mark.parametrize("service", ["prefill-0", "decode-0"])
def test_promtool_has_nothing_to_say(cluster, service):
    lint(httpx.get(cluster.metrics[service]).text)
