"""`kvrail chat` against a small server that speaks OpenAI's streaming format and notes what it is asked."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

ROOT = Path(__file__).parents[2]
KVRAIL = [sys.executable, "-m", "kvrail"]
PATIENCE_S = 30.0


class Server:
    """Answers with the last message's words; a message can ask for trouble by its first word."""

    def __init__(self):
        self.asked = []
        self.headers = []
        self.cancelled = threading.Event()
        self.models = ["tiny", "other"]
        routes = [Route("/v1/models", self.list_models), Route("/v1/chat/completions", self.chat, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def close(self):
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join()

    async def list_models(self, request):
        self.headers.append(dict(request.headers))
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def chat(self, request):
        body = await request.json()
        self.asked.append(body)
        words = body["messages"][-1]["content"].split()
        if words[0] == "refuse":
            return JSONResponse({"error": {"message": "temperature is -1; at least 0", "type": "x"}}, int(words[1]))
        drafts = "kvrail" in body and words[0] == "draft"
        return StreamingResponse(self.events(words, drafts), media_type="text/event-stream")

    async def events(self, words, drafts):
        def event(**content):
            return f"data: {json.dumps(content)}\n\n"

        def chunk(**delta):
            return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])

        yield ": a comment\n\n"
        yield chunk(role="assistant")
        if drafts:  # the first word is right, the second is not
            for position, text in enumerate((f"{words[0].upper()} ", "WRONG ")):
                news = {"provisional": {"index": 0, "position": position, "tokens": 1, "text": text}}
                yield event(choices=[{"index": 0, "delta": {}, "finish_reason": None}], kvrail=news)
            news = {"confirm": {"index": 0, "position": 0, "tokens": 1}, "retract": {"index": 0, "position": 1}}
            yield event(choices=[{"index": 0, "delta": {}, "finish_reason": None}], kvrail=news)
        for word in words:
            yield chunk(content=f"{word.upper()} ")
        if words[0] == "endless":
            try:
                while True:
                    yield chunk(content="more ")
                    await asyncio.sleep(0.01)
            finally:
                self.cancelled.set()
        if words[0] == "fail":
            yield event(error={"message": "the decode worker was lost", "type": "server_error"})
            return
        if words[0] != "tear":
            yield event(choices=[], usage={"prompt_tokens": 1})
            yield "data: [DONE]\n\n"


@pytest.fixture
def server():
    running = Server()
    yield running
    running.close()


def chat(server, *argv, stdin=None, **environment):
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(
        [*KVRAIL, "chat", "--url", server if isinstance(server, str) else server.url, *argv],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **given,
    )


def test_one_answer(server):
    done = chat(server, "hello", "there")
    assert (done.returncode, done.stdout, done.stderr) == (0, "HELLO THERE \n", "")
    assert server.asked == [{"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "stream": True}]


def test_standard_input_is_a_message(server):
    done = chat(server, stdin="from a\nfile\n")
    assert (done.returncode, done.stdout) == (0, "FROM A FILE \n")
    assert server.asked[0]["messages"][0]["content"] == "from a\nfile"


def test_flags_reach_the_request_and_only_those_that_were_given(server):
    argv = ("--system", "be brief", "--temperature", "0", "--max-tokens", "9", "--model", "other")
    assert chat(server, "hi", *argv).returncode == 0
    body = server.asked[0]
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("other", 0, 9)
    assert "top_p" not in body
    assert "seed" not in body


def test_the_key_comes_from_a_flag_or_the_environment(server):
    chat(server, "hi", KVRAIL_API_KEY="one")
    chat(server, "hi", "--api-key", "two", KVRAIL_API_KEY="one")
    assert [headers.get("authorization") for headers in server.headers] == ["Bearer one", "Bearer two"]


def test_an_address_may_end_in_v1_and_no_proxy_stands_before_this_machine(server):
    done = chat(f"{server.url}/v1/", "hi", http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (0, "HI \n")


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["refuse", "400"], 1, "temperature is -1; at least 0"),
        (["refuse", "401"], 1, "set KVRAIL_API_KEY or --api-key"),
        (["fail"], 1, "the answer broke off: the decode worker was lost"),
        (["tear"], 1, "the answer broke off"),
        (["--temperature", "warm", "hi"], 2, "--temperature"),
    ],
)
def test_an_error_is_one_line_and_a_status(server, argv, status, words):
    done = chat(server, *argv)
    assert done.returncode == status
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "status", "words"),
    [
        ("http://127.0.0.1:9", 1, "kvrail up"),
        ("http://no-such-host.invalid", 1, "cannot reach http://no-such-host.invalid"),
        ("127.0.0.1:8000", 2, "is no address"),
        ("http://[", 2, "is no address"),
    ],
)
def test_a_server_that_is_not_there(url, status, words):
    done = chat(url, "hi")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1)
    assert words in done.stderr


def test_a_server_that_is_something_else(server):
    done = chat(f"{server.url}/docs", "hi")
    assert done.returncode == 1
    assert "status 404; check --url" in done.stderr


def test_an_empty_standard_input(server):
    assert chat(server).returncode == 2
    assert server.asked == []


def test_ctrl_c_cancels_the_request_of_a_single_answer(server):
    command = [*KVRAIL, "chat", "--url", server.url, "endless"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout.read(len("ENDLESS more ")) == "ENDLESS more "
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert server.cancelled.wait(PATIENCE_S)


class Terminal:
    """A conversation on a pseudo terminal."""

    def __init__(self, url, *argv):
        self.master, slave = pty.openpty()
        command = [*KVRAIL, "chat", "--url", url, *argv]
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def until(self, text):
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.seen += os.read(self.master, 4096).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, line):
        os.write(self.master, f"{line}\n".encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(server):
    opened = Terminal(server.url, "--system", "be brief")
    yield opened
    opened.close()


def roles(body):
    return [message["role"] for message in body["messages"]]


def test_a_conversation_remembers_and_forgets(server, terminal):
    terminal.until("> ")
    for line in ("first thing", "second thing", "/reset", "/help", "/wrong", "third thing"):
        terminal.type(line)
        if not line.startswith("/"):
            terminal.until(line.upper())
        if line == "/help":
            terminal.until("/quit    end it")
        if line == "/wrong":
            terminal.until("/wrong is no command; /help lists them")
        terminal.until("> ")
    terminal.type("/quit")
    assert terminal.process.wait(PATIENCE_S) == 0
    assert [roles(body) for body in server.asked] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert server.asked[1]["messages"][2]["content"] == "FIRST THING "


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(server, terminal):
    terminal.until("> ")
    terminal.type("endless talk")
    terminal.until("more ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("(stopped)")
    assert server.cancelled.wait(PATIENCE_S)
    terminal.until("> ")
    terminal.type("go on")
    terminal.until("GO ON")
    told = server.asked[1]["messages"][2]
    assert told["role"] == "assistant"
    assert told["content"].startswith("ENDLESS TALK more ")


def test_an_error_in_a_conversation_is_told_and_the_message_forgotten(server, terminal):
    terminal.until("> ")
    terminal.type("fail please")
    terminal.until("error: the answer broke off: the decode worker was lost")
    terminal.type("/nonsense")
    terminal.until("/nonsense is no command")
    terminal.type("again")
    terminal.until("AGAIN")
    assert roles(server.asked[1]) == ["system", "user"]
    terminal.until("> ")
    os.write(terminal.master, b"\x04")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_a_terminal_shows_drafts_dimmed_then_solid_and_erases_wrong_ones(server, terminal):
    terminal.until("> ")
    terminal.type("draft twice")
    shown = terminal.until("TWICE ")
    assert "\x1b[2mDRAFT \x1b[0m" in shown and "\x1b[2mDRAFT WRONG \x1b[0m" in shown
    assert shown.endswith("\r\x1b[JDRAFT ")  # erased, and written solid
    assert server.asked[0]["kvrail"] == {"provisional": True}
    terminal.until("> ")


def test_what_is_no_terminal_asks_for_no_drafts(server):
    done = chat(server, "draft", "twice")
    assert done.stdout == "DRAFT TWICE \n"
    assert "kvrail" not in server.asked[0]
