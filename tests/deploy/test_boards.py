"""Grafana's boards: current, readable by Grafana's own SDK, and about metrics that exist; asked of Prometheus in
test_compose.py."""

import json
import re
import shutil
import string
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import combinations, pairwise
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source import live, vllm
from deploy.grafana.source.__main__ import FOLDER, rendered
from deploy.grafana.source.parts import STATES
from kvrail.services.router.fleet.policy import WorkerState
from kvrail.services.router.http.middleware import OPEN_PATHS
from kvrail.telemetry import buckets
from kvrail.telemetry.making import show_certificates, show_process, show_worker
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Family, Registry
from kvrail.telemetry.startup import Startup
from kvrail.telemetry.worker import CodecMetrics, EngineMetrics, MemoryMetrics, TransferMetrics

ROOT = Path(__file__).parents[2]
SCRAPED = {"instance", "job", "le"}
BOARDS = sorted(rendered())


WORKERS = re.compile(r"kvrail_(engine|kv|worker)_(?!info)")
"""Series of workers, which have one name on every panel: their role and the router's address of them."""


def board(name):
    return json.loads((FOLDER / name).read_text())


def panels(name):
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def known_series():
    """Labels of each series that the code can make, by name."""
    registry = Registry()
    for made in (RouterMetrics, EngineMetrics, TransferMetrics, CodecMetrics):
        made(registry, "m")
    Startup(registry, "m", "decode")
    MemoryMetrics(registry, "m", weights=0, kv_cache=0)
    show_process(registry, "1", 1)
    show_certificates(registry, {})
    show_worker(registry, "m", role="", device="", dtype="", kv_cache="", torch="", cuda="")
    known = {sample.name: SCRAPED for family in registry.collect() for sample in family.samples}
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}
    for family in registry.collectors:
        if isinstance(family, Family):
            known |= {family.name + ending: {*family.label_names, *SCRAPED} for ending in endings[family.type]}
    return known


def test_the_files_are_what_the_code_says():
    assert {path.name for path in FOLDER.glob("*.json")} == set(BOARDS)
    stale = [name for name, text in rendered().items() if (FOLDER / name).read_text() != text]
    assert stale == [], "run make boards"


@pytest.mark.parametrize("name", BOARDS)
def test_grafanas_sdk_reads_them_without_loss(name):
    plugins.register_default_plugins()
    text = (FOLDER / name).read_text()
    assert json.loads(json.dumps(Dashboard.from_json(json.loads(text)), cls=JSONEncoder)) == json.loads(text)


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_explains_itself(name):
    known = {value for key, value in vars(units).items() if isinstance(value, str) and not key.startswith("_")}
    for panel in panels(name):
        title = panel["title"]
        assert len(panel["description"]) > 10 and panel["description"].endswith("."), title
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in known or re.fullmatch(r"(count|suffix):\S+", unit), title
        assert unit != "none" or panel["type"] in ("table", "state-timeline"), f"{title}: values without a unit"
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, title
        for target in panel["targets"]:
            assert "{{instance}}" not in target["legendFormat"] or not WORKERS.search(target["expr"]), title
            grouped = re.search(r"\bby \((?!le\))", target["expr"])
            assert not grouped or "{{" in target["legendFormat"], f"{title}: series cannot be told apart"
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends), title


@pytest.mark.parametrize("name", BOARDS)
def test_panels_stand_beside_each_other(name):
    places = [(panel["title"], panel["gridPos"]) for panel in board(name)["panels"]]
    for (one, a), (other, b) in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, f"{one} covers {other}"
    assert all(place["x"] + place["w"] <= 24 for _, place in places)
    ids = [panel["id"] for panel in board(name)["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_is_defined(name):
    defined = {variable["name"] for variable in board(name)["templating"]["list"]}
    text = json.dumps(board(name)["panels"])
    assert set(re.findall(r"\$\{?([a-z]+)\b", text)) <= defined


def test_boards_have_their_own_names():
    uids = [board(name)["uid"] for name in BOARDS]
    assert len(set(uids)) == len(uids)


@pytest.mark.parametrize("name", BOARDS)
def test_every_board_marks_what_happened_to_workers(name):
    marks = {each["name"]: each for each in board(name)["annotations"]["list"]}
    assert set(marks) == {"worker lost", "restart", "deploy"}
    assert all(each["enable"] and each["datasource"]["uid"] == "${datasource}" for each in marks.values())


def test_latency_and_failures_lead_to_traces_and_logs():
    found = {link["title"]: link["url"] for name in BOARDS for panel in panels(name) for link in panel.get("links", [])}
    for title, source in (("Traces of slow requests", "${traces}"), ("Logs of failed requests", "${logs}")):
        pane = json.loads(parse_qs(urlsplit(found[title]).query)["panes"][0])["a"]
        assert pane["datasource"] == source and pane["range"] == {"from": "${__from}", "to": "${__to}"}
        (kind,) = [each for each in board("overview.json")["templating"]["list"] if source == f"${{{each['name']}}}"]
        assert kind["type"] == "datasource"


def test_bars_give_their_text_a_size():
    """Grafana shrinks and cuts names whose size it chooses itself."""
    bars = [panel for name in BOARDS for panel in panels(name) if panel["type"] == "bargauge"]
    assert bars and all(panel["options"]["text"]["titleSize"] <= 12 for panel in bars)


def test_http_panels_leave_probes_out():
    """A cluster that loads its models answers probes with 503, and no client has failed."""
    shown = [target["expr"] for panel in panels("router.json") for target in panel["targets"]]
    left_out = [re.search(r'handler!~"([^"]+)"', expr)[1] for expr in shown if "kvrail_http_" in expr]
    assert len(left_out) == 3
    for pattern in left_out:
        assert [path for path in OPEN_PATHS if not re.fullmatch(pattern, path)] == []
        assert not re.fullmatch(pattern, "/v1/chat/completions")


def test_a_quantile_of_http_leaps_over_no_gap():
    """A quantile is interpolated inside a bucket: with bounds of 60 and 600 s, 61 s looked like 10 minutes."""
    for bounds in (buckets.HTTP, buckets.PART):
        assert [pair for pair in pairwise(each for each in bounds if each >= 0.1) if pair[1] > 2.5 * pair[0]] == []


NAMED = """
rule_files: []
evaluation_interval: 5s
tests:
  - interval: 5s
    input_series:
      - {series: 'kvrail_worker_target{instance="r:1", role="decode", worker="d:7", target="d:9"}', values: '1x60'}
      - {series: 'kvrail_process_state{instance="d:9", role="decode", model_name="m", state="serving"}', values: '1x60'}
      - {series: 'kvrail_process_state{instance="e:9", role="decode", model_name="m", state="loading"}', values: '1x60'}
      - series: 'kvrail_kv_payload_bytes_total{instance="d:9", model_name="m", direction="received"}'
        values: 0+50x60
      - series: 'kvrail_kv_transfer_seconds_sum{instance="d:9", model_name="m", direction="received"}'
        values: 0+1x60
      - {series: 'kvrail_engine_pages{instance="d:9", model_name="m", state="used"}', values: '2x60'}
      - {series: 'kvrail_engine_pages{instance="d:9", model_name="m", state="free"}', values: '2x60'}
      - {series: 'kvrail_engine_pages{instance="e:9", model_name="m", state="used"}', values: '4x60'}
    promql_expr_test: []
"""


def test_links_and_names_without_large_transfers(promtool, tmp_path):
    """Short prompts measure no link, and a worker that no router knows keeps its address."""
    exprs = {asked.place: live.filled(asked.expr, "1m") for asked in live.panel_queries()}
    document = yaml.safe_load(NAMED)
    document["tests"][0]["promql_expr_test"] = [
        {
            "expr": exprs["transfer", "Links"],
            "eval_time": "4m",
            "exp_samples": [
                {"labels": '{instance="d:9", prefill_worker="all transfers", role="decode", worker="d:7"}', "value": 50}
            ],
        },
        {
            "expr": exprs["workers", "KV pages in use"],
            "eval_time": "4m",
            "exp_samples": [
                {"labels": '{instance="d:9", role="decode", worker="d:7"}', "value": 0.5},
                {"labels": '{instance="e:9", role="decode", worker="e:9"}', "value": 1},
            ],
        },
    ]
    (tmp_path / "named.yml").write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", str(tmp_path / "named.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def every_expression():
    return [
        *(live.filled(asked.expr, "1m") for asked in (*live.panel_queries(), *live.mark_queries())),
        *(rule["expr"] for rule in live.rules()),
    ]


def test_promtool_understands_every_query(promtool, tmp_path):
    queries = sorted({live.filled(asked.expr, "1m") for asked in (*live.panel_queries(), *live.mark_queries())})
    named = zip(map("q_{}".format, range(len(queries))), queries, strict=True)
    groups = {"groups": [{"name": "panels", "rules": [{"record": name, "expr": expr} for name, expr in named]}]}
    (tmp_path / "queries.yml").write_text(yaml.safe_dump(groups))
    done = promtool("check", "rules", str(tmp_path / "queries.yml"))
    assert done.returncode == 0, done.stderr


def test_every_metric_exists_with_its_labels():
    known, unknown = known_series(), set()
    for expr in every_expression():
        for name in live.METRIC.findall(live.RECORDED.sub("", expr)):
            if name not in known:
                unknown.add(name)
        for name, matchers in re.findall(r"\b(kvrail_[a-z0-9_]+){([^}]*)}", expr):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert name not in known or labels <= known[name], f"{name} has no labels {labels - known[name]}"
    assert unknown == set()
    recorded = {rule["record"] for rule in live.rules() if "record" in rule}
    used = {name for expr in every_expression() for name in live.RECORDED.findall(expr)}
    assert used <= recorded


def test_what_is_provisioned_is_there():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    grafana = services["grafana"]
    assert grafana["profiles"] == ["dashboards"]
    assert re.fullmatch(r"grafana/grafana:\d+\.\d+\.\d+", grafana["image"])
    mounts = dict(volume.split(":")[1::-1] for volume in grafana["volumes"])
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    provider, vllms = yaml.safe_load((folder / "dashboards" / "kvrail.yml").read_text())["providers"]
    assert (ROOT / mounts[provider["options"]["path"]]).resolve() == FOLDER
    assert (ROOT / mounts[vllms["options"]["path"]]).resolve() == vllm.FILES
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/overview.json"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services


class Prometheus(BaseHTTPRequestHandler):
    """Answers every query with one series, but for what `wrong` says."""

    wrong: ClassVar[dict] = {}

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        query = parse_qs(body)["query"][0]
        labels = {name: "x" for name in ("instance", "stage", "outcome", "state", "codec", "kind", "k", "le", "role")}
        labels |= {name: "x" for name in ("worker", "phase", "reason", "direction", "source", "handler", "status")}
        labels |= {"prefill_worker": "p", "model_name": "m", "use": "x", "way": "x"}
        status, result = 200, [{"metric": labels, "value": [0, "1"]}]
        for part, answer in self.wrong.items():
            if part in query:
                status, result = answer
        answer = {"data": {"result": result}} if status == 200 else {"error": result}
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        """Be quiet."""


@pytest.fixture
def prometheus():
    server = HTTPServer(("127.0.0.1", 0), Prometheus)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Prometheus.wrong = {}
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_live_check_sees_what_is_wrong(prometheus, monkeypatch, tmp_path):
    assert live.faults(prometheus) == []
    Prometheus.wrong = {"kvrail_queue_seconds": (200, []), "kvrail_failovers": (400, "no such function")}
    found = "\n".join(live.faults(prometheus))
    assert "router / Time in the queue: no series" in found
    assert "router / Failovers: no such function" in found
    Prometheus.wrong = {"kvrail_request_phase_seconds": (200, [{"metric": {}, "value": [0, "1"]}])}
    assert live.faults(prometheus) == ["request / Phases: no series has the label phase of the legend"]
    Prometheus.wrong = {"kvrail_engine_drafts": (200, [])}
    assert "drafts / Accepted" not in "\n".join(live.faults(prometheus))  # on the written list
    listed = tmp_path / "may_be_empty.yml"
    shutil.copy(live.MAY_BE_EMPTY, listed)
    with listed.open("a") as out:
        out.write("- {board: router, panel: Nowhere, why: a test}\n")
    monkeypatch.setattr(live, "MAY_BE_EMPTY", listed)
    assert "may_be_empty.yml names router / Nowhere, which is nowhere" in live.faults(prometheus)


def test_what_may_be_empty_says_why():
    for entry in yaml.safe_load(live.MAY_BE_EMPTY.read_text()):
        assert set(entry) == {"board", "panel", "why"}
        assert entry["why"].strip(string.punctuation + " ")


def test_the_boards_know_every_state_of_a_worker():
    assert set(STATES) == set(WorkerState)
