"""The status page in Chromium, before a real cluster under traffic: what it shows is what the metrics say."""

import contextlib
import itertools
import os
import random
import re
import shutil
import threading
import time
from collections import defaultdict

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.cluster import Cluster, started
from tests.e2e.processes import ROOT, free_ports
from tests.forked import Forked
from tests.scratch import new_folder

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import expect, sync_playwright
except ModuleNotFoundError:  # `make test` collects this module and runs nothing of it
    sync_playwright = None

pytestmark = [pytest.mark.page, pytest.mark.timeout(900)]

TEXT = (ROOT / "models" / "kvrail-demo" / "heldout.txt").read_text()
CODECS = ("splitzip-progressive-ans", "splitzip-channel", "raw")
SHOTS = os.environ.get("KVRAIL_PAGE_SHOTS")
"""A folder for screenshots of every look."""
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("--prefill-workers", "2", "--decode-workers", "2")
    with started(tmp_path_factory, *flags) as made:
        yield made


@pytest.fixture(scope="module")
def browser():
    if sync_playwright is None:
        pytest.fail("the extra `page` is not installed; make page-test installs it")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("Chromium is not installed; set CHROMIUM to where it is")
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=program, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield launched
        launched.close()


@contextlib.contextmanager
def looking(browser, url, scheme="light", width=1440, *, losses=False):
    """A page that has shown the cluster; what goes wrong in it fails the test, lost answers aside where `losses`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(url, timeout=PATIENCE_MS)
    try:
        expect(page.locator("main")).to_be_visible(timeout=PATIENCE_MS)
    except AssertionError as error:
        raise AssertionError(f"the page shows nothing: {wrong}") from error
    yield page
    context.close()
    assert [each for each in wrong if not (losses and each.startswith("Failed to load resource"))] == []


@contextlib.contextmanager
def traffic(cluster, clients=2):
    """Clients that ask one thing after another, until the block ends."""
    over = threading.Event()
    numbers = itertools.count()

    def ask():
        while not over.is_set():
            number = next(numbers)
            start = random.Random(number).randrange(len(TEXT) - 900)
            body = {"model": "kvrail-demo", "prompt": TEXT[start : start + 800], "max_tokens": 24, "temperature": 0}
            body["kvrail"] = {"codec": CODECS[number % len(CODECS)]}
            httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).raise_for_status()

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Metrics:
    """What /metrics of every process says now."""

    def __init__(self, cluster: Cluster) -> None:
        self._samples = {
            name: [
                sample
                for family in text_string_to_metric_families(httpx.get(url).raise_for_status().text)
                for sample in family.samples
            ]
            for name, url in cluster.metrics.items()
        }
        health = httpx.get(f"{cluster.url}/health").json()
        names = {
            role: sorted(name for name in cluster.metrics if name.startswith(role)) for role in ("prefill", "decode")
        }
        self._names = {
            address: name
            for role, known in names.items()
            for address, name in zip(health[f"{role}_workers"], known, strict=True)
        }

    def value(self, series: str, at: str) -> float:
        """The sum of a series over the router, over all workers of a role, or of one worker by its address."""
        name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})?", series).groups()
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', labels or "")).items()
        at = self._names.get(at, at)
        found = [
            sample.value
            for process, samples in self._samples.items()
            if process == at or process.startswith(f"{at}-")
            for sample in samples
            if sample.name == name and wanted <= sample.labels.items()
        ]
        assert found, f"no series {series} at {at}"
        return sum(found)


def dom(page) -> dict[tuple[str, str], float]:
    """What the page shows: by series and process."""
    rows = page.evaluate(
        "[...document.querySelectorAll('[data-series]')].map(e => [e.dataset.series, e.dataset.at, e.dataset.value])"
    )
    return {(series, at): float(value) for series, at, value in rows}


def until(page, condition: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition in JavaScript. Playwright's own wait evaluates a string there, which the page forbids."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(200)


def fresh(page, seconds: float) -> None:
    """Wait until the page shows what the router said so many seconds later."""
    shown = "Number(document.querySelector('main').dataset.uptime)"
    until(page, f"{shown} > {page.evaluate(shown) + seconds}")


def test_values_are_the_metrics_while_traffic_flows(cluster, browser):
    with looking(browser, cluster.url) as page:
        with traffic(cluster):
            until(
                page,
                "document.querySelectorAll('#kv [data-series]').length === 6"
                " && Number(document.querySelector('#drafts [data-series]')?.dataset.value) > 0",
                300,
            )
            for _ in range(3):
                before = Metrics(cluster)
                fresh(page, 4)
                seen = dom(page)
                after = Metrics(cluster)
                counters = {key: value for key, value in seen.items() if re.search(r"_(total|sum)(\{|$)", key[0])}
                assert len(counters) > 20
                wrong = {
                    key: (before.value(*key), value, after.value(*key))
                    for key, value in counters.items()
                    if not before.value(*key) - 1e-6 <= value <= after.value(*key) + 1e-6
                }
                assert wrong == {}
                assert seen['kvrail_requests_total{outcome="length"}', "router"] > 0
        fresh(page, 4)  # all has ended: every value is exact, gauges too
        seen, metrics = dom(page), Metrics(cluster)
        assert seen == {key: pytest.approx(metrics.value(*key)) for key in seen}
        kinds = defaultdict(int)
        for series, _ in seen:
            kinds[re.match(r"\w+", series)[0]] += 1
        assert kinds["kvrail_kv_link_bytes_per_second"] >= 2
        assert kinds["kvrail_request_stage_seconds_sum"] == 12
        assert kinds["kvrail_engine_sequences"] == 8
        check_words_and_bars(page, seen)


def check_words_and_bars(page, seen):
    """What is written and drawn is what the values say."""
    generated = seen["kvrail_generation_tokens_total", "router"]
    expect(page.locator("#tokens")).to_contain_text(f"{generated:,.0f}")
    raw = sum(value for (series, _), value in seen.items() if series.startswith("kvrail_kv_raw_bytes_total"))
    payload = sum(value for (series, _), value in seen.items() if series.startswith("kvrail_kv_payload_bytes_total"))
    assert raw > payload
    expect(page.locator("#kv .sum")).to_contain_text(f"{round(100 * (1 - payload / raw))} %")
    drawn = page.evaluate(
        "[...document.querySelectorAll('#split .track.tall rect')].map(e => parseFloat(e.getAttribute('width')))"
    )
    parts = [value for (series, _), value in seen.items() if series.startswith("kvrail_request_stage_seconds_sum")]
    assert sum(drawn) == pytest.approx(100)
    assert drawn == pytest.approx([100 * part / sum(parts) for part in parts], abs=1e-6)


def test_requests_events_clients_and_chat(cluster, browser):
    with looking(browser, cluster.url) as page:
        page.get_by_label("Message").fill("What is a pipe?")
        page.keyboard.press("Enter")
        expect(page.locator("#chat p.assistant")).to_contain_text("pipe", timeout=PATIENCE_MS)
        expect(page.locator("#chat p.failed")).to_have_count(0)
        asked = httpx.post(
            f"{cluster.url}/v1/completions",
            # Long enough to be among the twenty slowest on any machine: others ask for 24 tokens.
            json={"model": "kvrail-demo", "prompt": TEXT[:800], "max_tokens": 400, "ignore_eos": True},
            headers={"x-request-id": "seen-on-the-page"},
            timeout=120,
        )
        assert asked.status_code == 200
        row = page.locator("#notable li", has_text="seen-on-the-page")
        expect(row).to_contain_text("first token", timeout=PATIENCE_MS)
        assert row.locator("rect").count() > 3
        expect(page.locator("#changes li", has_text="joined").first).to_be_visible()
        expect(page.locator("#cluster .card", has_text="memory")).to_have_count(4)
        expect(page.locator("#cluster .card", has_text="KV pages: plain")).to_have_count(4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_every_look_is_readable(cluster, browser, scheme, width):
    with traffic(cluster, 1), looking(browser, cluster.url, scheme, width) as page:
        fresh(page, 3)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        beyond = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert beyond == []
        assert page.locator(".wires path.wire").count() == (0 if width < 760 else page.locator(".links li").count())
        if SHOTS:
            page.screenshot(path=f"{SHOTS}/page-{scheme}-{width}.png", full_page=True)
        problems = Axe().run(page).response["violations"]
        assert [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in problems] == []


def test_a_router_that_cannot_be_reached_is_said_so_and_found_again(cluster, browser):
    with looking(browser, cluster.url, losses=True) as page:
        expect(page.locator("#state")).to_have_text("ok")
        page.context.set_offline(True)
        expect(page.get_by_role("alert")).to_contain_text("Cannot reach the router", timeout=30_000)
        expect(page.locator("#state")).to_have_text("unreachable")
        expect(page.locator("body")).to_have_class(re.compile("stale"))
        if SHOTS:
            page.screenshot(path=f"{SHOTS}/page-unreachable.png")
        page.context.set_offline(False)
        expect(page.get_by_role("alert")).to_be_hidden(timeout=30_000)
        expect(page.locator("#state")).to_have_text("ok")
        page.route("**/status.json", lambda route: route.fulfill(status=503, body="no"))
        expect(page.get_by_role("alert")).to_contain_text("answered with status 503", timeout=30_000)
        page.unroute("**/status.json")
        expect(page.get_by_role("alert")).to_be_hidden(timeout=30_000)


@contextlib.contextmanager
def second_router(cluster, *flags):
    """Another router before the same workers; its URL."""
    health = httpx.get(f"{cluster.url}/health").json()
    port = free_ports(1)[0]
    workers = [f"--{role}-workers={','.join(health[f'{role}_workers'])}" for role in ("decode", "prefill")]
    process = Forked(["router", "--port", port, *workers, *flags], new_folder("router") / "log")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_a_key_shows_the_rest(cluster, browser):
    with second_router(cluster, "--api-keys", "secret") as url:
        wait_for_answers(url)
        check_key(browser, url)


def wait_for_answers(url):
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        assert time.monotonic() < deadline, "the router does not answer"
        time.sleep(0.2)


def check_key(browser, url):
    with looking(browser, url) as page:
        expect(page.locator("#cluster li.card")).to_have_count(4)
        expect(page.locator("#split")).to_be_hidden()
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key")).to_contain_text("none of this server's API keys")
        page.locator("#api-key").fill("secret")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#split")).to_be_visible()
        expect(page.locator("#split")).to_contain_text("No request has been answered yet")  # the empty state
        expect(page.locator("#key")).to_be_hidden()
        if SHOTS:
            page.screenshot(path=f"{SHOTS}/page-empty.png", full_page=True)
