"""The client against a server that is scripted byte by byte."""

import itertools
import socket
import ssl
import threading
from dataclasses import replace

import pytest

from kvrail.runtime import loops
from kvrail.tools.bench.answers import Answer, Failure, read
from kvrail.tools.bench.client import IDLE_S, TIMEOUT, Client
from kvrail.tools.bench.load import Load, Range, completion
from kvrail.tools.bench.run import measure
from tests.bench.server import DONE, END, HEAD, Server, answer, chunked, event, good, refusal, token, usage
from tests.certificates import Authority

PATIENCE_S = 60.0
LOAD = Load(requests=6, streams=2, prompt=Range(3, 6), output=Range(2, 4), vocab=50)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def ask(client, tokens=2, times=1):
    """What came of each of some requests, one after the other."""
    request = completion("tiny", [1, 2], tokens, seed=7, sampling="sampled")

    async def asking():
        found = [read(await client.ask(request.body), tokens) for _ in range(times)]
        client.close()
        return found

    return loops.run(asking())


def test_a_load_arrives_as_it_was_made(server):
    run = measure(Client(server.url + "/v1/", "secret"), LOAD, "tiny")
    assert (len(run.answers), run.failures, run.unfinished) == (6, [], 0)
    assert sorted(found.tokens for found in run.answers) == sorted(body["max_tokens"] for body in server.asked)
    assert all(head.startswith("POST /v1/completions HTTP/1.1\r\n") for head in server.heads)
    assert all("authorization: Bearer secret\r\n" in head for head in server.heads)
    assert run.seconds > 0 and server.connections <= 6


def test_as_many_requests_are_open_as_there_are_streams(server):
    both = threading.Barrier(2)

    def respond(body):
        both.wait(PATIENCE_S)  # raises where there is but one
        return good(body)

    server.respond = respond
    run = measure(Client(server.url, clock=lambda: 0.0), LOAD, "tiny")
    assert (len(run.answers), server.connections) == (6, 2)


def test_an_open_load_is_sent_whole(server):
    run = measure(
        Client(server.url), Load(requests=6, rate=1e4, prompt=Range(3, 3), output=Range(2, 2), vocab=9), "tiny"
    )
    assert (len(run.answers), len(server.asked)) == (6, 6)


def test_connections_are_used_again_unless_they_were_idle_for_long(server):
    found = ask(Client(server.url, clock=lambda: 0.0), times=3)
    assert all(isinstance(each, Answer) for each in found) and server.connections == 1
    ticks = itertools.count(step=2 * IDLE_S)
    found = ask(Client(server.url, clock=lambda: next(ticks)), times=3)
    assert all(isinstance(each, Answer) for each in found) and server.connections == 4


LAST = token("z", "length")
RESPONSES = [
    (refusal(500, "boom"), "HTTP 500", "boom"),
    (refusal(429, "the queue is full"), "HTTP 429", "the queue is full"),
    (HEAD + chunked(token() + event(error={"message": "lost"})) + END, "error in the stream", "lost"),
    (HEAD + chunked(token()), "broke off", "closed the connection"),
    (None, "broke off", "closed the connection"),
    (HEAD + chunked(token() + LAST) + END, "broke off", "without [DONE]"),
    (HEAD + chunked(answer(1)) + END, "wrong number of tokens", "1 tokens came; 2 were asked for"),
    (HEAD + chunked(token() + token() + usage(2) + DONE) + END, "no finish reason", "finish_reason"),
    (HEAD + chunked(token() + LAST + DONE) + END, "no usage", "include_usage"),
    (b"220 mail.example ESMTP\r\n", "unreadable", "not HTTP"),
]


def test_failures_are_counted_by_kind_and_the_load_goes_on(server):
    left = [response for response, _, _ in RESPONSES]
    server.respond = lambda body: left.pop() if left else good(body)
    load = replace(LOAD, requests=len(RESPONSES) + 2, streams=1, output=Range(2, 2))
    run = measure(Client(server.url), load, "tiny")
    assert len(run.answers) == 2
    for failure, (_, kind, message) in zip(reversed(run.failures), RESPONSES, strict=True):
        assert failure.kind == kind and message in failure.message


def test_a_refused_connection_is_a_failure_of_its_own():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        (found,) = ask(Client(f"http://127.0.0.1:{unused.getsockname()[1]}"))
    assert isinstance(found, Failure) and found.kind == "cannot connect"


def test_a_request_that_does_not_end_is_given_up(server):
    ended = threading.Event()
    server.respond = lambda body: ended.wait(PATIENCE_S) and None
    (found,) = ask(Client(server.url, timeout_s=0.05))
    ended.set()
    assert found == Failure(TIMEOUT, "it had not ended after 0.05 s")


def test_certificates_are_checked(tmp_path, monkeypatch):
    authority = Authority(tmp_path / "ca")
    authority.write("router")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "ca" / "router.pem", tmp_path / "ca" / "router.key")
    server = Server(tls=context)
    try:
        (found,) = ask(Client(server.url))
        assert isinstance(found, Failure) and found.kind == "cannot connect" and "certificate" in found.message
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca" / "ca.pem"))
        (found,) = ask(Client(server.url))
        assert isinstance(found, Answer)
    finally:
        server.close()
