"""Log lines: both formats, the request id, uvicorn's loggers."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator

import pytest
import uvicorn

from kvrail.runtime import logs


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    yield
    root.handlers[:] = kept
    root.setLevel(level)


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", "json", "router")
    logger = logging.getLogger("kvrail.test")
    logger.debug("hidden")
    with logs.bound_request_id("r-1"):
        logger.info("hello %s\nworld é", 5)
        try:
            raise KeyError("x")
        except KeyError:
            logger.exception("bad")
    logger.warning("outside")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["hello 5\nworld é", "bad", "outside"]
    assert [line["request_id"] for line in lines] == ["r-1", "r-1", "-"]
    assert [line["level"] for line in lines] == ["info", "error", "warning"]
    assert {line["service"] for line in lines} == {"router"}
    assert {line["logger"] for line in lines} == {"kvrail.test"}
    assert "KeyError: 'x'" in lines[1]["exception"] and "exception" not in lines[0]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["ts"]) for line in lines)


def test_fields_and_trace_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", "json", "router")
    logs.trace_ids.set(None)  # of a test before this one
    logger = logging.getLogger("kvrail.test")
    with logs.bound_request_id("r-1"):
        logs.trace_ids.set(("a" * 32, "b" * 16))
        logger.info("stop", extra={"fields": {"outcome": "stop", "total_s": 0.5}})
    logger.info("outside")
    first, second = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (first["trace_id"], first["span_id"]) == ("a" * 32, "b" * 16)
    assert (first["outcome"], first["total_s"], first["message"]) == ("stop", 0.5, "stop")
    assert not {"trace_id", "span_id"} & set(second)


def test_text_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("debug", "text", "decode")
    with logs.bound_request_id("r-2"):
        logging.getLogger("kvrail.test").debug("hello")
    line = capsys.readouterr().err
    assert re.fullmatch(r"\S+Z DEBUG   decode kvrail\.test \[r-2\] hello\n", line)


def test_tasks_keep_their_own_id(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", "json", "router")

    async def work(name: str) -> None:
        with logs.bound_request_id(name):
            await asyncio.sleep(0)
            logging.getLogger("kvrail.test").info(name)

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(both())
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["request_id"] for line in lines if line["logger"] == "kvrail.test"] == ["a", "b"]


def test_uvicorn_and_a_second_setup_give_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    uvicorn.Config(app="none")  # installs uvicorn's own handlers
    logs.setup("info", "text", "router")
    logs.setup("info", "json", "router")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "1.2.3.4", "GET", "/", "1.1", 200)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["uvicorn.error", "uvicorn.access"]
    assert lines[1]["message"] == '1.2.3.4 - "GET / HTTP/1.1" 200'


def test_a_message_cannot_forge_a_line_or_steer_a_terminal(capsys):
    logs.setup("info", "text", "router")
    with logs.bound_request_id("r\nx"):
        logging.getLogger("kvrail.test").info("said %s", "a\r\n2026 ERROR forged \x1b[2J\u2028end")
    (line,) = capsys.readouterr().err.splitlines()
    assert "[r\\x0ax] said a\\x0d\\x0a2026 ERROR forged \\x1b[2J\\x2028end" in line
