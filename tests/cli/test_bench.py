"""`kvrail bench`: its flags, its report and its exit status."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvrail.cli.main import main
from kvrail.text import load_tokenizer
from tests.bench.server import Server, good, refusal
from tests.router.cluster import MODEL, run_cluster, write_tokenizer

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SMALL = ("--requests", "6", "--streams", "2", "--prompt-tokens", "3:6", "--output-tokens", "2:4")


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def bench(capsys, *argv):
    """Exit status, standard output, standard error."""
    try:
        status = main(["bench", *argv])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_report_and_the_file_have_the_same_figures(capsys, server, tmp_path):
    path = tmp_path / "run.json"
    status, out, err = bench(
        capsys, "--url", server.url, *SMALL, "--goodput", "ttft:60000", "tpot:60000", "--json", str(path)
    )
    assert status == 0, err
    told = json.loads(path.read_text())
    assert (told["completed"], told["failed"], told["model"], told["url"]) == (6, 0, "tiny", server.url)
    assert told["load"]["prompt"] == {"least": 3, "most": 6} and told["load"]["streams"] == 2
    assert told["goodput"] == {"ttft": 60000.0, "tpot": 60000.0}
    assert told["request_goodput"] == pytest.approx(6 / told["duration"])
    assert told["total_output_tokens"] == sum(body["max_tokens"] for body in server.asked)
    assert "requests that succeeded   6\n" in out
    assert f"{told['request_goodput']:.2f} (ttft ≤ 60000 ms, tpot ≤ 60000 ms)" in out
    assert f"TTFT{told['mean_ttft_ms']:>32.1f}{told['median_ttft_ms']:>10.1f}{told['p99_ttft_ms']:>10.1f}" in out


def test_two_runs_send_the_same_load(capsys, server):
    sent = []
    for _ in range(2):
        assert bench(capsys, "--url", server.url, *SMALL, "--seed", "5")[0] == 0
        sent.append(sorted(map(json.dumps, server.asked)))
        server.asked.clear()
    assert sent[0] == sent[1]
    assert bench(capsys, "--url", server.url, *SMALL, "--seed", "6", "--sampling", "greedy", "--vocab", "9")[0] == 0
    assert {body["temperature"] for body in server.asked} == {0}
    assert max(max(body["prompt"]) for body in server.asked) < 9


TRACE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 60_000, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]},
    {"timestamp": 90_000, "input_length": 5000, "output_length": 9, "hash_ids": list(range(10))},
    {"timestamp": 95_000, "input_length": 40, "output_length": 4, "hash_ids": [10]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)))
    return path


def test_a_trace_is_replayed(capsys, server, trace, tmp_path):
    argv = ("--trace", str(trace), "--speed", "200", "--longest", "2000", "--json", str(tmp_path / "run.json"))
    status, out, err = bench(capsys, "--url", server.url, *argv)
    assert status == 0, err
    assert "40–1,100 in, 2–4 out, trace.jsonl (1 of more than 2,000 tokens left out) at speed 200, 3 requests" in err
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.asked] == [(1000, 3), (1100, 2), (40, 4)]
    assert server.asked[0]["prompt"] == server.asked[1]["prompt"][:1000]
    assert "requests left out         1, longer than --longest\n" in out
    told = json.loads((tmp_path / "run.json").read_text())
    assert (told["completed"], told["left_out"], told["load"]["speed"]) == (3, 1, 200.0)
    assert told["load"]["trace"] == {"name": "trace.jsonl", "longest": 2000, "left_out": 1}
    assert told["duration"] >= 0.9 * 95 / 200  # an event loop's timer may be early by its resolution


def test_a_trace_is_all_of_it_or_its_first_requests(capsys, server, trace):
    assert bench(capsys, "--url", server.url, "--trace", str(trace), "--speed", "1000")[0] == 0
    assert len(server.asked) == 4
    server.asked.clear()
    assert bench(capsys, "--url", server.url, "--trace", str(trace), "--speed", "1000", "--requests", "2")[0] == 0
    assert len(server.asked) == 2


def test_a_failed_request_is_status_1(capsys, server):
    bad = iter([True])
    server.respond = lambda body: refusal(429, "the queue is full") if next(bad, False) else good(body)
    status, out, _ = bench(capsys, "--url", server.url, *SMALL)
    assert status == 1
    assert "requests that succeeded   5\nrequests that failed      1\n" in out
    assert "  1 × HTTP 429, for example: the queue is full\n" in out


def test_a_server_that_is_not_there(capsys, server):
    server.close()
    status, out, err = bench(capsys, "--url", server.url, *SMALL)
    assert (status, out) == (1, "") and f"cannot reach {server.url}" in err
    status, out, _ = bench(capsys, "--url", server.url, "--model", "tiny", *SMALL)
    assert status == 1 and "6 × cannot connect, for example: " in out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--rate", "0"], "argument --rate: '0' is not accepted; write a number above 0"),
        (["--rate", "nan"], "argument --rate: 'nan' is not accepted"),
        (["--streams", "0"], "argument --streams: '0' is not accepted; write a whole number, at least 1"),
        (["--streams", "2", "--rate", "3"], "argument --rate: not allowed with argument --streams"),
        (["--prompt-tokens", "9:3"], "argument --prompt-tokens: '9:3' is not accepted; write 1024, or a range such as"),
        (["--output-tokens", "0"], "argument --output-tokens: '0' is not accepted"),
        (["--output-tokens", "3:"], "argument --output-tokens: '3:' is not accepted"),
        (["--goodput", "itl:3"], "argument --goodput: 'itl:3' is not accepted; write ttft, tpot, e2el with :MS"),
        (["--goodput", "ttft"], "argument --goodput: 'ttft' is not accepted"),
        (["--prefixes", "8"], "--prefixes needs --prefix-tokens too, for example --prefixes 8 --prefix-tokens 3072"),
        (["--prefix-tokens", "8"], "--prefix-tokens needs --prefixes too"),
        (["--trace", "a.jsonl", "--rate", "3"], "argument --rate: not allowed with argument --trace"),
        (["--trace", "a.jsonl", "--speed", "0"], "argument --speed: '0' is not accepted; write a number above 0"),
        (["--trace", "a.jsonl", "--output-tokens", "9"], "--output-tokens goes without --trace, which says how long"),
        (["--trace", "/nowhere/a.jsonl"], "/nowhere/a.jsonl cannot be read: No such file or directory"),
        (["--speed", "2"], "--speed needs --trace too"),
        (["--rate", "2", "--longest", "9"], "--longest needs --trace too"),
        (["--json", "/nowhere/run.json"], "--json: /nowhere/run.json cannot be written: No such file or directory"),
        (["--url", "nowhere"], "--url: 'nowhere' is no address"),
        (["--reqests", "3"], "unknown argument --reqests; did you mean --requests?"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, argv, line):
    status, out, err = bench(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"kvrail bench: {line}") and err.count("\n") == 1


def test_ctrl_c_reports_what_was_measured(server):
    held, ended = threading.Event(), threading.Event()

    def respond(body):
        if len(server.asked) < 3:
            return good(body)
        held.set()
        ended.wait(PATIENCE_S)
        return None

    server.respond = respond
    command = [sys.executable, "-m", "kvrail", "bench", "--url", server.url, "--requests", "6", "--streams", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert held.wait(PATIENCE_S)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    ended.set()
    assert process.returncode == 130, err
    assert "requests that succeeded   2\nrequests that failed      0\nrequests not finished     4\n" in out
    assert "Traceback" not in err


@pytest.fixture
def patient(monkeypatch):
    """The cluster shares this process with the client: on a busy machine its workers' statuses may take seconds."""
    monkeypatch.setattr("kvrail.services.router.fleet.worker.STATUS_TIMEOUT_S", PATIENCE_S)


async def test_a_router_of_ours_is_measured(capsys, tmp_path, patient):
    write_tokenizer(tmp_path)
    argv = ["--rate", "500", "--requests", "5", "--prompt-tokens", "3:6", "--output-tokens", "1:2", "--vocab", "280"]
    async with run_cluster(load_tokenizer(str(tmp_path))) as cluster:
        path = tmp_path / "run.json"
        status, out, err = await asyncio.to_thread(bench, capsys, "--url", cluster.url, *argv, "--json", str(path))
        prompts = sorted(list(request.prompt_token_ids) for worker in cluster.decode for request in worker.requests)
    assert status == 0, (out, err)
    told = await asyncio.to_thread(lambda: json.loads(path.read_text()))
    assert (told["completed"], told["model"], told["codecs"]) == (5, MODEL, {"raw": 5})
    assert (told["kv_bytes"], told["kv_raw_bytes"], told["cached_input_tokens"]) == (5000, 7500, 15)
    assert told["total_input_tokens"] == sum(map(len, prompts)) and set(map(len, prompts)) <= set(range(3, 7))
    assert set(told["stage_median_ms"]) >= {"prefill"}


async def test_a_router_of_ours_gets_a_trace(capsys, tmp_path, trace, patient):
    write_tokenizer(tmp_path)
    lines = [{**line, "output_length": 2, "input_length": 3 + number} for number, line in enumerate(TRACE)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    argv = ["--trace", str(trace), "--speed", "1000", "--vocab", "280", "--sampling", "greedy"]
    async with run_cluster(load_tokenizer(str(tmp_path))) as cluster:
        status, out, err = await asyncio.to_thread(bench, capsys, "--url", cluster.url, *argv)
        asked = [list(each.prompt_token_ids) for worker in cluster.decode for each in worker.requests]
    assert status == 0, (out, err)
    prompts = sorted(asked, key=len)
    assert [len(prompt) for prompt in prompts] == [3, 4, 5, 6]
    assert prompts[0] == prompts[1][:3] == prompts[2][:3] != prompts[3][:3]
