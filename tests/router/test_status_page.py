"""The status page's files and headers, and its JSON beside the metrics; tests/page draws it in a browser."""

import asyncio
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kvrail.rpc.report import Device, report_of
from kvrail.services.router.answer.recent import RecentRequests
from kvrail.services.router.fleet.changes import Changes
from kvrail.services.router.page.history import STEPS, History, quantile
from kvrail.services.router.page.routes import FILES
from kvrail.services.router.page.status import FRESH_S, StatusPage
from kvrail.telemetry.moments import PARTS
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Family, Registry
from kvrail.telemetry.worker import CodecMetrics, EngineMetrics, TransferMetrics
from kvrail.text import Tokenizer
from kvrail.wire.v1 import common_pb2
from tests.router.cluster import MODEL, Cluster, run_cluster, status, until

REPORT = common_pb2.WorkerReport(
    received=[common_pb2.CodecBytes(codec="splitzip", raw_bytes=4000, payload_bytes=3000)],
    drafts_proposed=10,
    drafts_accepted=7,
    link_bytes_per_s={"p:1": 2.5e9},
)


async def shown(cluster: Cluster, **headers: str) -> dict:
    """The page's JSON, computed anew."""
    cluster.server._app.state.status_page._made.clear()
    answer = await cluster.http.get("/status.json", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


class Loaded(HTMLParser):
    """What a page loads, and what of it would run or style by itself."""

    def __init__(self):
        super().__init__()
        self.loads, self.links, self.inline = [], [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.loads += [given[name] for name in ("src",) if name in given]
        (self.loads if tag == "link" else self.links).extend([given["href"]] if "href" in given else [])
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


async def test_the_page_loads_only_what_the_router_serves(cluster: Cluster):
    answer = await cluster.http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Loaded()
    page.feed(answer.text)
    assert page.inline == []
    assert len(page.loads) >= 3
    for path in page.loads:
        part = await cluster.http.get(f"/{path}")
        assert part.status_code == 200, path
        assert part.headers["x-content-type-options"] == "nosniff"
    for name, path in FILES.items():
        text = path.read_text().replace("http://www.w3.org/", "")
        assert not re.search(r"https?://|@import|eval\(|innerHTML", text), name
    for module in re.findall(r'from "\./(\w+\.js)"', "".join(path.read_text() for path in FILES.values())):
        kind = (await cluster.http.get(f"/page/{module}")).headers["content-type"]
        assert kind.startswith("text/javascript"), module
    for link in page.links:
        if not link.startswith("#"):
            assert (await cluster.http.get(f"/{link}")).status_code == 200, link


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_scripts_are_javascript(tmp_path: Path):
    for name, path in FILES.items():
        if name.endswith(".js"):
            module = tmp_path / f"{path.stem}.mjs"
            module.write_bytes(path.read_bytes())
            done = subprocess.run(["node", "--check", module], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/status.json"])
async def test_nothing_else_may_be_loaded(cluster: Cluster, path: str):
    policy = (await cluster.http.get(path)).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"


async def test_other_files_are_not_served(cluster: Cluster):
    for path in ("/page/status.py", "/page/..%2froutes.py", "/page/", "/page/nothing.js"):
        assert (await cluster.http.get(path)).status_code == 404, path
    assert (await cluster.http.head("/")).status_code == 200


async def test_values_are_those_of_the_metrics(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await check_values(cluster)


async def check_values(cluster: Cluster):
    for decode in cluster.decode:
        decode.status = status(report=REPORT, running=3, waiting=1, kv_in_clear=True)
    await cluster.complete(prompt=[1, 2, 3], n=2)
    await cluster.complete(prompt=[1, 2], max_tokens=1)
    await cluster.complete(temperature="hot")
    pool = cluster.service.pool
    await until(lambda: all(worker.answer and worker.answer.running == 3 for worker in pool.decode.values()))
    found = await shown(cluster)
    assert found["shown"] == "all"
    assert [worker["kv_cache"] for worker in found["workers"]] == ["plain"] * 3
    assert [worker["kv_in_clear"] for worker in found["workers"]] == [False, True, True]
    for outcome in ("stop", "length", "invalid", "error"):
        assert found["outcomes"][outcome] == await cluster.metric(f'kvrail_requests_total{{outcome="{outcome}"}}')
    assert found["outcomes"]["stop"] == found["outcomes"]["length"] == found["outcomes"]["invalid"] == 1
    assert found["tokens"] == {
        "prompt": await cluster.metric("kvrail_prompt_tokens_total{}"),
        "cached": await cluster.metric("kvrail_cached_prompt_tokens_total{}"),
        "generated": await cluster.metric("kvrail_generation_tokens_total{}"),
    }
    split = found["split"]
    assert split["requests"] == 2
    assert split["seconds"] == pytest.approx(await cluster.metric("kvrail_request_seconds_sum{}"))
    assert list(split["parts"]) == [name for name, _, _ in PARTS]
    assert sum(split["parts"].values()) == pytest.approx(split["seconds"], rel=0.05)
    assert found["kv"] == {"splitzip": {"raw": 8000, "payload": 6000}}  # of both
    assert found["drafts"] == {"proposed": 20, "accepted": 14}
    assert found["ways"] == {"here": {}, "apart": {}}
    for way, reason in (("here", "cost"), ("here", "cost"), ("apart", "gap")):
        cluster.service.metrics.went(way, reason)
    await asyncio.sleep(FRESH_S)
    assert (await shown(cluster))["ways"] == {"here": {"cost": 2.0}, "apart": {"gap": 1.0}}
    prefill, decode, _ = found["workers"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert decode["links"] == {"p:1": 2.5e9}
    assert (decode["running"], decode["waiting"], decode["max_running"]) == (3, 1, 8)


async def test_rates_are_those_of_the_counters():
    registry, now = CollectorRegistry(), 0.0
    metrics = RouterMetrics(registry, MODEL)
    history = History(registry, lambda: now)
    metrics.generation_tokens.inc(30)
    metrics.outcomes["stop"].inc()
    now = 2.0
    history.sample()
    now = 4.0
    history.sample()
    assert history.rates(lambda sample: sample.tokens) == [15.0, 0.0]
    assert history.rates(lambda sample: sample.requests) == [0.5, 0.0]
    for _ in range(2 * STEPS):
        history.sample()
    assert len(history.rates(lambda sample: sample.tokens)) == STEPS


async def test_percentiles_are_prometheus_quantiles():
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, MODEL)
    metrics.time_to_first_token.observe(30.0)  # before the first sample: not of late
    history = History(registry)
    assert quantile(0.5, history.oldest.first, history.now().first) is None
    metrics.time_to_first_token.observe(0.15, 98)  # of the bucket from 0.1 to 0.25
    metrics.time_to_first_token.observe(3000.0, 2)  # beyond the last bound
    pair = history.oldest.first, history.now().first
    assert quantile(0.5, *pair) == pytest.approx(0.1 + 0.15 * 50 / 98)
    assert quantile(0.99, *pair) == 2560.0


def test_failed_and_slow_requests_are_kept_with_their_parts():
    now = 0.0
    recent = RecentRequests(lambda: now)
    for number in range(30):
        recent.add(f"r{number}", "c", "stop", total_s=float(number), first_token_s=0.1, parts_s={"decode": number})
    for outcome in ("cancelled", "invalid", "unavailable", "deadline"):
        recent.add(outcome, "c", outcome, total_s=1.0, first_token_s=None, parts_s={})
    found = recent.notable()
    assert [each["id"] for each in found[:4]] == ["deadline", "unavailable", "r29", "r28"]
    assert (len(found), found[2]["parts_s"]) == (20, {"decode": 29})
    now = 1000.0
    assert [each["id"] for each in recent.notable()] == ["deadline", "unavailable"]


async def test_what_happens_to_workers_is_shown(tokenizer: Tokenizer):
    async with run_cluster(tokenizer) as cluster:
        changes, (decode,) = cluster.service.pool.changes, cluster.decode
        await until(lambda: [each["what"] for each in changes.all()] == ["joined", "joined"])
        decode.status = status(report=common_pb2.WorkerReport(compiling=["lynx"]))
        await until(lambda: changes.all()[0]["what"] == "compiling")
        decode.status = status()
        await until(lambda: changes.all()[0]["what"] == "compiled")
        assert changes.all()[0]["detail"] == "lynx"
        decode.status = status(instance=8)
        await until(lambda: changes.all()[0]["what"] == "restarted")
        decode.hung = True
        await until(lambda: changes.all()[0]["what"] == "lost")
        assert {"restarted", "lost"} <= {each["what"] for each in (await shown(cluster))["changes"]}


@pytest.mark.parametrize("what", ["joined", "restarted", "left"])
def test_what_an_earlier_process_compiled_is_forgotten(what: str):
    changes = Changes()
    changes.compile("decode", "d:1", ["lynx"])
    changes.add(what, "decode", "d:1")
    assert not changes._compiling
    changes.compile("decode", "d:1", [])
    assert [each["what"] for each in changes.all()] == [what, "compiling"]


async def test_only_operators_and_open_servers_show_who_asks(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["secret"]) as cluster:
        await cluster.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "hi"}, headers={"x-api-key": "secret"}
        )
        found = await shown(cluster, authorization="Bearer secret")
        assert found["clients"] is None and [each["client"] for each in found["notable"]] == [""]
        operators = json.loads(cluster.server._app.state.status_page.body(everything=True, operators=True))
        assert operators["clients"] == {} and operators["notable"][0]["client"] and not operators["chat"]


async def test_many_viewers_cost_one_computation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    now, computed = 0.0, []
    page = StatusPage(cluster.service, lambda: now)
    monkeypatch.setattr(page, "_all", lambda: computed.append(now) or {"at": now, "notable": []})
    bodies = [page.body(everything=True) for _ in range(50)]
    assert len(computed) == len(set(bodies)) == 1
    now = 1.5
    assert page.body(everything=True) == b'{"at":1.5,"notable":[],"chat":true}'


async def test_a_stranger_learns_no_more_than_from_health(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["secret"]) as cluster:
        await cluster.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "hi"}, headers={"x-api-key": "secret"}
        )
        health = (await cluster.http.get("/health")).json()
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await cluster.http.get("/", headers=headers)).status_code == 200
            found = await shown(cluster, **headers)
            assert found.pop("shown") == "health"
            assert found.pop("active") == health["active_requests"]
            for worker in found.pop("workers"):
                assert worker == {
                    "role": worker["role"],
                    "address": worker["address"],
                    **health[f"{worker['role']}_workers"][worker["address"]],
                }
            assert found == {"status": health["status"], "model": health["model"]}
        assert (await shown(cluster, authorization="Bearer secret"))["shown"] == "all"


async def test_the_operator_opens_it_or_switches_it_off(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["secret"], status_page="open") as cluster:
        assert (await shown(cluster))["shown"] == "all"
    async with run_cluster(tokenizer, status_page="off") as cluster:
        answers: list[httpx.Response] = [
            await cluster.http.get(path) for path in ("/", "/status.json", "/page/main.js")
        ]
        assert [answer.status_code for answer in answers] == [404, 404, 404]


async def test_with_an_admin_port_it_is_there_alone_and_shows_all(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["secret"], admin_port=0) as cluster:
        for path in ("/", "/status.json", "/page/main.js"):
            assert (await cluster.http.get(path, headers={"x-api-key": "secret"})).status_code == 404
        async with httpx.AsyncClient(base_url=cluster.admin_url) as operators:
            assert (await operators.get("/")).status_code == 200
            assert (await operators.get("/status.json")).json()["shown"] == "all"


def test_a_worker_reports_what_its_metrics_say():
    registry = CollectorRegistry()
    assert report_of(registry, Device()) == common_pb2.WorkerReport()
    engine = EngineMetrics(registry, MODEL)
    transfers = TransferMetrics(registry, MODEL, ("raw", "splitzip"))
    engine.drafts_proposed.inc(10)
    engine.drafts_accepted.inc(7)
    transfers.crossed("received", "splitzip", raw_bytes=4000, payload_bytes=3000)
    transfers.crossed("sent", "raw", raw_bytes=1, payload_bytes=1)
    transfers.link_measured("p:1", 2.5e9)
    CodecMetrics(registry, MODEL).compiling("lynx", True)
    device = Device("GPU", 3, 4)
    found = common_pb2.WorkerReport(compiling=["lynx"], device="GPU", memory_used=3, memory_total=4)
    found.MergeFrom(REPORT)
    assert report_of(registry, device) == found


def test_every_metric_that_the_page_names_exists():
    registry = Registry()
    for made in (RouterMetrics, EngineMetrics, TransferMetrics, CodecMetrics):
        made(registry, MODEL)
    families = [family for family in registry.collectors if isinstance(family, Family)]
    known = {name for family in families for name in (family.name, f"{family.name}_total")}
    folder = FILES["main.js"].parent
    sources = [*FILES.values(), *folder.glob("*.py"), folder.parents[2] / "rpc" / "report.py"]
    named = {name for path in sources for name in re.findall(r"kvrail_[a-z0-9_]+", path.read_text())}
    assert len(named) > 10
    assert {re.sub(r"_(sum|count)$", "", name) for name in named} <= known
