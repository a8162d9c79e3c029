"""What vLLM's own dashboards ask is what kvrail says under vLLM's names; asked of a live cluster in test_compose.py."""

import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from deploy.grafana.source import vllm

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
VALUES = {"job": "(kvrail-vllm)", "model_name": "(m)", "instance": "(i)", "Deployment_id": "(m)"}
VALUES |= {"ttft_slo": "1.0", "tpot_slo": "0.1"}


def documented():
    """Series under vLLM's names, as docs/metrics.md has them, which is made from the code."""
    table = METRICS_PAGE.read_text().split("<!-- vllm -->")[1].split("<!-- end of vllm -->")[0]
    endings = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", table, re.MULTILINE)
    return {name + ending for name, kind in rows for ending in endings[kind]}


def test_every_metric_is_documented_or_listed_as_empty():
    assert len(vllm.names()) > 40
    assert vllm.names() - documented() == vllm.empty().keys()
    assert all(len(why) > 20 for why in vllm.empty().values())


def test_promtool_understands_every_query(promtool, tmp_path):
    queries = sorted({vllm.filled(asked.expr, VALUES) for board in vllm.boards() for asked in board.queries})
    rules = [{"record": f"q_{number}", "expr": expr} for number, expr in enumerate(queries)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", str(tmp_path / "queries.yml"))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def answers(monkeypatch):
    """The numbers that a Prometheus would answer, by part of a query: the last entry that fits."""
    known = {"": [1.0], "external_prefix_cache": [], "mm_cache": []}

    def ask(url, expr):
        numbers = next(numbers for part, numbers in reversed(known.items()) if part in expr)
        if isinstance(numbers, str):
            raise ValueError(numbers)
        return [{"metric": {}, "value": [0, str(number)]} for number in numbers]

    monkeypatch.setattr(vllm, "ask", ask)
    monkeypatch.setattr(vllm, "values_of", lambda url, board: VALUES)
    return known


def test_the_live_check_sees_what_is_wrong(answers):
    assert vllm.faults("http://x") == []
    answers["iteration_tokens_total_count"] = [math.nan]
    answers["num_preemptions_total"] = []
    answers["prompt_tokens_by_source_total"] = "no such function"
    answers["mm_cache"] = [0.5]
    found = "\n".join(vllm.faults("http://x"))
    assert "Performance Statistics / TPS (Tokens Per Second) Over Time: no numbers" in found
    assert "vLLM / Overview / Preemptions: no series" in found
    assert "vLLM / Overview / Prompt tokens by source: no such function" in found
    assert "vLLM / Overview / Cache hit rates: is listed as empty and has series" in found


def test_a_panel_is_asked_by_its_name(answers):
    answers["sum(vllm:num_requests_running"] = [3.0]
    assert vllm.panel("http://x", vllm.OVERVIEW, "Running") == [3.0]
    assert vllm.panel("http://x", vllm.OVERVIEW, "Engines") == [1.0]


class Labels(BaseHTTPRequestHandler):
    """Answers like a Prometheus that is asked for the values of a label: with two, and a third without a selector."""

    def do_GET(self):
        path = urlsplit(self.path)
        label, selector = path.path.split("/")[4], parse_qs(path.query).get("match[]")
        values = [f"{label}.b", f"{label}-a"] if selector else [f"{label}-0", f"{label}-1"]
        self.server.asked.append(selector)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": values}).encode())

    def log_message(self, *arguments):
        """Be quiet."""


def test_a_dashboard_of_grafanas_is_filled_in_as_grafana_does():
    board = vllm.of_grafana(
        {
            "title": "some",
            "panels": [
                {"title": "one", "type": "stat", "targets": [{"expr": 'm{job=~"$job", le="${slo:raw}"}[$__range]'}]},
                {"title": "row", "type": "row", "panels": [{"title": "two", "targets": [{"expr": 'm{a="$first"}'}]}]},
            ],
            "templating": {
                "list": [
                    {"type": "datasource", "name": "datasource", "query": "prometheus"},
                    {"type": "query", "name": "first", "query": "label_values(x)"},
                    {
                        "type": "query",
                        "name": "job",
                        "includeAll": True,
                        "definition": 'label_values(m{a="$first"},job)',
                    },
                    {"type": "custom", "name": "slo", "current": {"value": "1.0"}},
                ]
            },
        }
    )
    server = HTTPServer(("127.0.0.1", 0), Labels)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        values = vllm.values_of(f"http://127.0.0.1:{server.server_port}", board)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert server.asked == [None, ['m{a="x-0"}']]
    assert [(asked.panel, vllm.filled(asked.expr, values)) for asked in board.queries] == [
        ("one", r'm{job=~"(job-a|job\\.b)", le="1.0"}[1h]'),
        ("two", 'm{a="x-0"}'),
    ]
