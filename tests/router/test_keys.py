"""Keys of the file: who is let in, what each may take, what is told of it."""

import asyncio
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from kvrail.errors import ConfigError
from kvrail.security.keyfile import KeyFile, hash_of, parse
from kvrail.services.router.http.quotas import WINDOW_S, Quotas, Window, duration
from tests.router.cluster import MODEL, run_cluster
from tests.router.scripts import error_of


def table(name, **limits):
    """A key whose secret is its name, and its table."""
    values = {"name": f'"{name}"', "sha256": f'"{hash_of(name)}"', **limits}
    return "[[keys]]\n" + "".join(f"{field} = {value}\n" for field, value in values.items())


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture
def at_once(monkeypatch):
    """Files are looked at whenever they are used."""
    monkeypatch.setattr("kvrail.runtime.watched.LOOK_EVERY_S", 0.0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(
        table("free")
        + table("few", requests_per_minute=2)
        + table("little", tokens_per_minute=5)
        + table("one", concurrent_requests=1)
        + table("other", models='["tiny-2"]')
        + table("old", expires="2020-01-31")
    )
    return path


@pytest.fixture
async def cluster(tokenizer, file, at_once):
    names = f"{MODEL},tiny-2"
    async with run_cluster(tokenizer, served_model_name=names, api_keys=["plain"], api_keys_file=str(file)) as running:
        yield running


def post(cluster, secret, **fields):
    body = {"model": MODEL, "prompt": "hi"} | fields
    return cluster.http.post("/v1/completions", json=body, headers=bearer(secret))


async def test_who_is_let_in(cluster):
    assert (await post(cluster, "free")).status_code == 200
    assert (await post(cluster, "plain")).status_code == 200
    assert (await cluster.http.get("/v1/models", headers={"x-api-key": "free"})).status_code == 200
    for wrong in ("x", "fre", "free.", hash_of("free")):
        error_of(await post(cluster, wrong), 401, "invalid_api_key")
    assert "expired 2020-01-31" in error_of(await post(cluster, "old"), 401, "invalid_api_key")


async def test_the_status_page_knows_keys_of_the_file(cluster):
    """A stranger, or who has a key that has ended, learns what /health tells; a holder sees all."""
    for secret, shown in ((None, "health"), ("wrong", "health"), ("old", "health"), ("free", "all")):
        answer = await cluster.http.get("/status.json", headers=bearer(secret) if secret else {})
        assert (answer.status_code, answer.json()["shown"]) == (200, shown)


async def test_a_file_of_keys_alone_closes_the_status_page(tokenizer, file):
    async with run_cluster(tokenizer, api_keys_file=str(file)) as cluster:
        assert (await cluster.http.get("/status.json")).json()["shown"] == "health"
        assert (await cluster.http.get("/status.json", headers=bearer("free"))).json()["shown"] == "all"


async def test_requests_of_a_minute(cluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="few", max_retries=0) as client:
        raw = client.completions.with_raw_response
        first = await raw.create(model=MODEL, prompt="hi")
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        await raw.create(model=MODEL, prompt="hi")
        with pytest.raises(openai.RateLimitError) as caught:
            await raw.create(model=MODEL, prompt="hi")
    headers = caught.value.response.headers
    assert caught.value.code == "rate_limit_exceeded"
    assert 50 < int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert re.fullmatch(r"1m0s|5\ds", headers["x-ratelimit-reset-requests"])
    assert (await cluster.http.get("/v1/models", headers=bearer("few"))).status_code == 200
    assert (await post(cluster, "free")).status_code == 200, "another's limit is in the way"
    assert await cluster.metric('kvrail_key_refused_requests_total{key="few",limit="requests",}') == 1
    assert await cluster.metric('kvrail_key_requests_total{key="few",}') == 2


async def test_tokens_of_a_minute_are_those_of_the_usage(cluster):
    answer = await post(cluster, "little", stream=False)
    usage = answer.json()["usage"]
    assert usage["total_tokens"] > 5, "the request must go beyond its limit for this test to mean anything"
    refused = await post(cluster, "little")
    error_of(refused, 429, "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    for kind, field in (("prompt", "prompt_tokens"), ("generated", "completion_tokens")):
        assert await cluster.metric(f'kvrail_key_tokens_total{{key="little",kind="{kind}",}}') == usage[field]


async def test_requests_at_once(cluster):
    began, go = asyncio.Event(), asyncio.Event()
    answered = cluster.decode[0].script

    async def waits(worker, request):
        began.set()
        await go.wait()
        async for reply in answered(worker, request):
            yield reply

    cluster.decode[0].script = waits
    first = asyncio.create_task(post(cluster, "one", stream=True))
    await began.wait()
    refused = await post(cluster, "one")
    error_of(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"
    go.set()
    assert (await first).status_code == 200
    assert (await post(cluster, "one")).status_code == 200


async def test_models_of_a_key(cluster):
    assert (await post(cluster, "other", model="tiny-2")).status_code == 200
    assert "not for the model" in error_of(await post(cluster, "other"), 404, "model_not_found")


class Watching:
    """A file of keys that is looked at every two seconds, and what was said of it."""

    def __init__(self, file, monkeypatch, caplog):
        self.now = 0.0
        monkeypatch.setattr("kvrail.runtime.watched.monotonic", lambda: self.now)
        self._keys, self._log, self.failures = KeyFile(str(file)), caplog, []
        self._keys.on_failure(lambda: self.failures.append(self.now))

    def names(self):
        self.now += 2.0
        return [key.name for key in self._keys.keys().values()]

    def told(self):
        told = [record.getMessage() for record in self._log.records if record.levelname == "ERROR"]
        self._log.clear()
        return told


@pytest.fixture
def watching(file, monkeypatch, caplog):
    file.write_text(table("alice") + table("bob"))
    return Watching(file, monkeypatch, caplog)


def test_a_change_that_could_not_be_read_is_tried_again(file, watching, monkeypatch):
    """As where the process is out of file descriptors for a moment; told once."""

    def exhausted(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    file.write_text(table("alice"))
    with monkeypatch.context() as moment:
        moment.setattr(Path, "read_bytes", exhausted)
        assert [watching.names() for _ in range(3)] == [["alice", "bob"]] * 3
    assert len(watching.told()) == len(watching.failures) == 1
    assert watching.names() == ["alice"]
    for name in ("bob", "carol"):
        file.unlink()
        assert len({tuple(watching.names()) for _ in range(3)}) == 1
        file.write_text(table(name))
        assert watching.names() == [name]
    file.write_text("[[keys")
    assert watching.names() == ["carol"]
    assert [text.partition("toml: ")[2][:13] for text in watching.told()] == ["reload failed"] * 3
    assert len(watching.failures) == 4


def test_reading_what_is_no_good_takes_a_hundredth_of_the_time(file, watching, monkeypatch):
    began = []

    def slow(*_):
        began.append(watching.now)
        watching.now += 0.5
        raise ConfigError("no good")

    monkeypatch.setattr("kvrail.security.keyfile.parse", slow)
    file.write_text("1")
    while watching.now < 120.0:
        watching.names()
    assert began == [2.0, 52.5, 102.5 + 0.5]
    file.write_text("12")
    watching.names()
    assert len(began) == 4, "a change is read at once"


def test_a_change_is_seen_that_keeps_length_and_time(file, watching):
    before = file.stat()
    file.write_text(table("alice") + table("bab"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_size) == (before.st_ino, before.st_size)
    assert watching.names() == ["alice", "bab"]


def test_a_file_that_is_written_in_place_is_empty_for_a_moment(file, watching):
    content = file.read_text()
    with file.open("w") as unfinished:
        assert watching.names() == ["alice", "bob"]
        assert "is empty" in watching.told()[0]
        unfinished.write(content + table("carol"))
    assert watching.names() == ["alice", "bob", "carol"]
    file.write_text("# none\n")
    assert watching.names() == []
    file.write_text("")
    assert not KeyFile(str(file)).keys(), "at the start there may be none"


async def test_a_changed_file_is_taken_over_and_a_broken_one_is_not(cluster, file, caplog):
    good = file.read_text()
    file.write_text(good + table("new"))
    assert (await post(cluster, "new")).status_code == 200
    file.write_text(table("free") + "[[keys]]\nname = 7\n")
    assert (await post(cluster, "new")).status_code == 200
    assert "keys.toml: reload failed" in caplog.text and "key 2 (7): name" in caplog.text
    assert await cluster.metric("kvrail_key_file_errors_total{}") == 1
    file.write_text(good)
    error_of(await post(cluster, "new"), 401, "invalid_api_key")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("[[keys", "is not TOML"),
        ('[[keys]]\nname = "a"\n', "sha256"),
        (table("a", requests_per_minute=0), "requests_per_minute"),
        (table("a", tokens_per_day=1), "tokens_per_day"),
        (table("a") + table("a"), "twice"),
        ('keys = ["a"]', "key 1"),
        ("[other]\n", "other"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(content, match):
    with pytest.raises(ConfigError, match=match) as caught:
        parse(content.encode(), "the file")
    assert hash_of("a") not in str(caught.value)


def test_windows_against_a_count_of_every_second():
    """A slow count of all that was taken in the last minute says the same; after the wait there is room, not before."""
    now = [0.0]
    window, taken = Window(lambda: now[0]), []

    def slow(at):
        return sum(amount for when, amount in taken if when > at - WINDOW_S)

    for step in range(300):
        now[0] = step * 1.75
        if step % 3:
            amount = step % 7
            window.add(amount)
            taken.append((now[0], amount))
        assert window.sum == slow(now[0])
        for limit in (1, 20, 60, 1000):
            wait = window.room_after(limit)
            if slow(now[0]) < limit:
                assert wait == 0
            else:
                assert slow(now[0] + wait) < limit <= slow(now[0] + wait - 0.01)


def test_a_key_that_is_never_used_takes_no_memory():
    assert not Quotas().by_name


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.12, "120ms"), (1, "1s"), (59.1, "1m0s"), (360, "6m0s")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_command_makes_a_key_that_opens(tmp_path):
    path = tmp_path / "keys.toml"

    def add(*arguments):
        command = [sys.executable, "-m", "kvrail", "keys", "add", *arguments, "--file", str(path)]
        return subprocess.run(command, capture_output=True, text=True)

    made = add("alice", "--requests-per-minute", "3", "--models", "a,b", "--expires", "2999-01-31")
    secret = made.stdout.strip()
    assert made.returncode == 0 and secret.startswith("kvrail-") and secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    key = parse(path.read_bytes(), "it")[hash_of(secret)]
    assert (key.name, key.requests_per_minute, key.models, key.expires.year) == ("alice", 3, ["a", "b"], 2999)
    twice = add("alice")
    assert twice.returncode == 2 and "twice" in twice.stderr and not twice.stdout
    assert len(parse(path.read_bytes(), "it")) == 1
