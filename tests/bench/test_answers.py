"""What is made of a reply whose bytes came at known moments."""

import pytest

from kvrail.tools.bench.answers import Answer, Failure, read
from kvrail.tools.bench.client import TIMEOUT, Reply
from tests.bench.server import DONE, answer, event, token, usage

LAST = token("z", "length")


def reply(*parts, begin=10.0, status=200, trouble=None):
    return Reply(begin, status, list(parts), trouble)


def test_latencies_are_those_of_the_chunks_with_output():
    found = read(
        reply(
            (10.3, b": waiting\n\n" + token("a")),
            (10.4, token("b") + token("c")),
            (10.9, LAST),
            (11.5, usage(4) + DONE),
        ),
        4,
    )
    assert isinstance(found, Answer)
    assert found.ttft == pytest.approx(0.3)
    assert found.gaps == pytest.approx([0.1, 0.0, 0.5])
    assert found.e2el == pytest.approx(0.9)  # the usage's chunk has no token
    assert found.tpot == pytest.approx(0.6 / 3)
    assert (found.text, found.tokens) == ("abcz", 4)


def test_an_event_has_come_when_its_last_byte_has():
    first, second = token("a"), LAST
    cut = len(first) + 20
    whole = first + second + usage(2) + DONE
    found = read(reply((10.1, whole[:7]), (10.2, whole[7:cut]), (10.6, whole[cut:])), 2)
    assert (found.ttft, found.gaps) == (pytest.approx(0.2), pytest.approx([0.4]))


def test_lines_may_end_as_http_ends_them():
    found = read(reply((10.1, answer(3).replace(b"\n", b"\r\n"))), 3)
    assert isinstance(found, Answer)


def test_tokens_that_share_a_chunk_count_each():
    found = read(reply((10.1, token()), (10.7, LAST + usage(5) + DONE)), 5)
    assert found.tpot == pytest.approx(0.6 / 4)


def test_one_token_has_no_time_after_it():
    found = read(reply((10.5, answer(1))), 1)
    assert (found.ttft, found.tpot, found.e2el) == (0.5, 0.0, 0.5)


BROKEN = ("broke off", "the server closed the connection")
CASES = [
    (reply((10.1, b'{"error": {"message": "boom"}}'), status=500), "HTTP 500", "boom"),
    (reply((10.1, b"<html>"), status=429), "HTTP 429", "<html>"),
    (reply(status=503), "HTTP 503", "(no message)"),
    (reply((10.1, token()), trouble=BROKEN), "broke off", "closed the connection"),
    (reply(status=0, trouble=BROKEN), "broke off", "closed the connection"),
    (reply((10.1, token() + LAST + usage(2))), "broke off", "without [DONE]"),
    (reply((10.1, token() + event(error={"message": "lost"}))), "error in the stream", "lost"),
    (reply((10.1, event(error="lost"))), "error in the stream", "lost"),
    (reply((10.1, answer(1))), "wrong number of tokens", "1 tokens came; 2 were asked for"),
    (reply((10.1, answer(3))), "wrong number of tokens", "3 tokens came; 2 were asked for"),
    (reply((10.1, usage(2) + DONE)), "wrong number of tokens", ""),
    (reply((10.1, token() + token() + usage(2) + DONE)), "no finish reason", "finish_reason"),
    (reply((10.1, token() + LAST + DONE)), "no usage", "include_usage"),
    (reply((10.1, b"data: {]\n\n")), "unreadable", "stream of completions"),
    (reply((10.1, b"data: 7\n\n")), "unreadable", "stream of completions"),
    (reply((10.1, event(choices=[]) + b"data: \xff\n\n")), "unreadable", "stream of completions"),
    (reply(status=0, trouble=("cannot connect", "refused")), "cannot connect", "refused"),
    (reply((10.1, token()), trouble=(TIMEOUT, "it had not ended after 1 s")), TIMEOUT, "after 1 s"),
    (reply((10.1, answer(2)), trouble=(TIMEOUT, "it had not ended after 1 s")), TIMEOUT, "after 1 s"),
]


@pytest.mark.parametrize(("given", "kind", "message"), CASES)
def test_each_failure_has_its_kind(given, kind, message):
    found = read(given, 2)
    assert isinstance(found, Failure) and found.kind == kind
    assert message in found.message


def test_the_end_of_the_connection_may_be_the_end_of_the_response():
    assert isinstance(read(reply((10.1, answer(2)), trouble=BROKEN), 2), Answer)
