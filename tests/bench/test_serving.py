"""`benchmarks.serving`: its rows, the field's loads, and its gate."""

import itertools
import json
import sys
from dataclasses import replace

import pytest

from benchmarks import serving
from kvrail.tools.bench.load import Load, Range, requests_of
from tests.bench.server import END, HEAD, Server, answer, chunked, refusal, token

SHORT = {"prompt": Range(512, 1536), "output": Range(64, 192)}
FIELD = [
    Load(rate=16, requests=240, vocab=9, **SHORT),
    Load(rate=24, requests=320, vocab=9, **SHORT),
    Load(rate=32, requests=320, vocab=9, **SHORT),
    Load(
        rate=16, requests=192, vocab=9, prompt=Range(256, 256), output=Range(128, 128), prefixes=8, prefix_tokens=3072
    ),
    Load(rate=3, requests=60, vocab=9, prompt=Range(2400, 9600), output=Range(102, 410)),
]


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def loads(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["serving", *argv])
    return list(serving.loads(serving.parse(), 9))


def test_the_loads_of_the_field(monkeypatch):
    found = loads(monkeypatch, "--loads", "field", "--sampling", "sampled")
    assert [replace(load, seed=0) for load in found] == FIELD
    assert serving.parse().goodput == (("ttft", 300), ("tpot", 15))


def test_a_row_of_each_kind_for_each_load_with_prompts_of_its_own(monkeypatch):
    found = loads(monkeypatch, "--streams", "2,3x8", "--rounds", "5", "--prompt-tokens", "4:6")
    assert [(load.streams, load.requests, load.prompt, load.sampling) for load in found] == [
        (streams, 5 * streams, prompt, sampling)
        for streams, prompt in ((2, Range(4, 6)), (3, Range(8, 8)))
        for sampling in ("sampled", "greedy")
    ]
    bodies = [json.loads(request.body) for load in found for request in requests_of(load, "tiny")]
    assert len({body["seed"] for body in bodies}) == len(bodies)
    rates = loads(monkeypatch, "--rate", "2,4.5", "--requests", "7", "--sampling", "greedy")
    assert [(load.rate, load.requests, load.streams, load.sampling) for load in rates] == [
        (2.0, 7, 0, "greedy"),
        (4.5, 7, 0, "greedy"),
    ]


def test_a_row_of_a_trace_for_each_speed_with_prompts_of_its_own(monkeypatch, tmp_path):
    line = {"input_length": 600, "output_length": 2}
    moments = ((0, [0, 1]), (4000, [0, 2]))
    lines = [json.dumps({"timestamp": moment, "hash_ids": blocks} | line) for moment, blocks in moments]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    argv = ("--trace", str(tmp_path / "trace.jsonl"), "--speed", "0.5,2", "--sampling", "sampled")
    slow, fast = (list(requests_of(load, "tiny")) for load in loads(monkeypatch, *argv))
    assert [[request.arrival for request in row] for row in (slow, fast)] == [[0.0, 8.0], [0.0, 2.0]]
    (one, other), (own, _) = ([json.loads(request.body)["prompt"] for request in row] for row in (slow, fast))
    assert one[:512] == other[:512] != own[:512]
    assert len(loads(monkeypatch, *argv, "--requests", "1", "--longest", "602")[0].trace.requests) == 1


def run(monkeypatch, server, *argv):
    small = ("--streams", "2", "--rounds", "2", "--prompt-tokens", "4", "--output-tokens", "3")
    monkeypatch.setattr(sys, "argv", ["serving", "--url", server.url, "--model", "tiny", *small, *argv])
    serving.main()


def test_results_have_hardware_date_commit_and_command(monkeypatch, server, tmp_path):
    run(monkeypatch, server, "--out", str(tmp_path))
    told = json.loads((tmp_path / "serving.json").read_text())
    assert [(row["settings"]["sampling"], row["completed"]) for row in told["rows"]] == [("sampled", 4), ("greedy", 4)]
    assert told["date"] and told["commit"] and server.url in told["hardware"] and "--rounds 2" in told["command"]
    page = (tmp_path / "serving.md").read_text()
    assert (
        f"- command: {told['command']}\n" in page and "| 4 in, 3 out, 2 streams, 4 requests, greedy | 4 | 0 |" in page
    )


def test_a_row_with_failures_is_told_and_ends_with_status_1(monkeypatch, server, capsys):
    good = server.respond
    numbers = itertools.count()
    server.respond = lambda body: refusal(500, "boom") if next(numbers) == 7 else good(body)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, server, "--sampling", "sampled")
    assert ended.value.code == 1
    assert "1 x HTTP 500, for example: boom" in capsys.readouterr().out


def test_an_output_that_changes_is_refused(monkeypatch, server):
    numbers = itertools.count()

    def respond(body):
        first = token(str(next(numbers)))
        return HEAD + chunked(first + answer(body["max_tokens"]).partition(b"\n\n")[2]) + END

    server.respond = respond
    with pytest.raises(SystemExit, match="the same request gave '0a"):
        run(monkeypatch, server)


def test_flags_for_a_cluster_that_is_not_started_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        loads(monkeypatch, "--up", "--transport", "tcp")
    assert "--up needs --shape" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--streams", "2,x"], "'' is not accepted"),
        (["--streams", "2,2x8/"], "'' is not accepted"),
        (["--streams", "2x8/9/1"], "'9/1' is not accepted"),
        (["--rate", "a"], "'a'"),
        (["--speed", "2"], "--speed needs --trace"),
    ],
)
def test_a_load_that_is_none_is_refused(monkeypatch, server, argv, message):
    monkeypatch.setattr(sys, "argv", ["serving", "--url", server.url, "--model", "tiny", *argv])
    with pytest.raises(SystemExit, match=message):
        serving.main()
