"""`kvrail status` against bodies of /health: of a router for operators and for strangers, and of other servers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvrail.cli.main import main

HEALTH = {
    "status": "ok",
    "model": "m",
    "fingerprint": "f",
    "active_requests": 1,
    "decode_workers": {
        "127.0.0.1:7002": {
            "state": "ready",
            "running": 3,
            "waiting": 0,
            "pages_total": 200,
            "pages_free": 100,
            "pages_cached": 50,
            "codecs": ["raw"],
            "kv_cache": "lossless",
            "invariant": True,
            "numerics": "n",
        }
    },
    "workers": {},
    "prefill_workers": {"p:7001": {"state": "down", "detail": "connection refused"}},
    "dns": {"p:7001": {"addresses": [], "detail": "does not resolve"}},
}


@pytest.fixture
def router():
    """A server that answers /health with `answer`, a pair of status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = self.server.answer
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_each_worker_has_a_line(router, capsys):
    router.answer = (200, HEALTH)
    assert main(["status", "--url", router.url]) == 0
    assert capsys.readouterr().out == (
        "ok: m, 1 request active\n"
        "\n"
        "role     worker          state  running  waiting  pages used    cached       free  KV pages  batch-invariant"
        "  detail\n"
        "decode   127.0.0.1:7002  ready        3        0    50 (25%)  50 (25%)  100 (50%)  lossless  yes\n"
        "prefill  p:7001          down" + " " * 81 + "connection refused\n"
        "p:7001: does not resolve\n"
    )


def test_a_cluster_that_serves_nothing_is_shown_and_fails(router, capsys):
    router.answer = (503, HEALTH | {"status": "unavailable", "dns": {}})
    assert main(["status", "--url", router.url]) == 1
    assert capsys.readouterr().out.startswith("unavailable: m, ")


def test_a_stranger_sees_the_status_and_how_to_see_more(router, capsys):
    router.answer = (200, {"status": "ok"})
    assert main(["status", "--url", router.url]) == 0
    assert "admin port" in capsys.readouterr().out


def test_json_is_the_body(router, capsys):
    router.answer = (200, HEALTH)
    assert main(["status", "--url", router.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == HEALTH


def test_watching_shows_each_change_until_it_is_interrupted(router, capsys, monkeypatch):
    router.answer = (200, HEALTH)

    def sleep(seconds):
        assert seconds == 0.5
        if router.answer[0] == 503:
            raise KeyboardInterrupt
        router.answer = (503, HEALTH | {"status": "unavailable"})

    monkeypatch.setattr("kvrail.cli.remote.status.time.sleep", sleep)
    assert main(["status", "--url", router.url, "--watch", "0.5"]) == 130
    out = capsys.readouterr().out
    assert out.index("ok: m") < out.index("unavailable: m")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"state": "ok"}'])
def test_another_server_is_named(router, capsys, body):
    router.answer = (200, body)
    assert main(["status", "--url", router.url]) == 1
    assert f"{router.url}/health is no router's of kvrail; check --url" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["0", "soon", "nan", "1e9"])
def test_a_pause_that_is_none_is_refused(capsys, given):
    assert main(["status", "--watch", given]) == 2
    assert "--watch" in capsys.readouterr().err
