"""Draws the boards of a cluster under traffic with Grafana's own components: `make boards-picture`.

A demo cluster answers clients, one of its workers is killed, Prometheus scrapes it all, and each board's time series,
numbers and bars are drawn in Chromium in a light and a dark theme. A panel without data, a legend without a name and
values without a unit are faults, named a line each; the process then ends with 1. Needs Node, Chromium and Prometheus.
"""

import argparse
import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from playwright.sync_api import Browser, sync_playwright

from deploy.grafana.source.live import BOARDS, MAY_BE_EMPTY, RULES, filled
from tests.e2e.cluster import ROOT, Cluster, pid_at
from tests.e2e.processes import free_ports

log = logging.getLogger("boards")
HERE = Path(__file__).parent
TEXT = (ROOT / "models" / "kvrail-demo" / "heldout.txt").read_text(encoding="utf-8")
CODECS = ("splitzip-progressive-ans", "splitzip-channel", "auto")
SCRAPE_S = 1
STEP_S = 2
MODES = ("light", "dark")


def bundle(folder: Path) -> tuple[str, str]:
    """The script that draws, with Grafana's components in it, and its styles. Installs them from npm at first."""
    if not (HERE / "node_modules" / "@grafana" / "ui").exists():
        log.info("installing Grafana's components, two minutes, once")
        subprocess.run(["npm", "install", "--legacy-peer-deps", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    out = folder / "draw.js"
    flags = ["--bundle", "--format=iife", "--jsx=automatic", "--log-level=error", "--loader:.ttf=empty"]
    define = ['--define:process.env.NODE_ENV="production"', "--define:global=window"]
    program = HERE / "node_modules" / ".bin" / "esbuild"
    subprocess.run([program, "draw.jsx", *flags, *define, f"--outfile={out}"], cwd=HERE, check=True)
    return out.read_text(encoding="utf-8"), out.with_suffix(".css").read_text(encoding="utf-8")


@contextmanager
def prometheus(router: str, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes what the router lists; its URL."""
    program = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    if program is None:
        raise SystemExit("Prometheus is not installed; set PROMETHEUS to where it is")
    discovery = {"url": f"{router}/metrics/targets", "refresh_interval": "2s"}
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(RULES / "*.yml")],
        "scrape_configs": [{"job_name": "kvrail", "http_sd_configs": [discovery]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as out:
        process = subprocess.Popen([program, *flags, f"--web.listen-address={address}"], stdout=out, stderr=out)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def traffic(url: str, clients: int) -> Iterator[None]:
    """Clients that ask one thing after another, streamed and not, long and short, until the block ends."""
    over = threading.Event()
    numbers = itertools.count()

    def ask() -> None:
        while not over.is_set():
            number = next(numbers)
            start = random.Random(number).randrange(len(TEXT) - 1200)
            prompt = TEXT[start : start + (120 if number % 4 else 1100)]
            body: dict[str, Any] = {"model": "kvrail-demo", "prompt": prompt}
            body |= {"max_tokens": 48, "temperature": 0, "stream": bool(number % 2)}
            body["kvrail"] = {"codec": CODECS[number % len(CODECS)], "provisional": bool(number % 2)}
            with suppress(httpx.HTTPError):  # a worker is killed
                httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def kill_a_worker(cluster: Cluster) -> None:
    """Kill one decode worker of `kvrail up`, which starts another."""
    os.kill(pid_at(cluster.metrics["decode-0"]), signal.SIGKILL)


def asked(url: str, panel: dict[str, Any], begin: float, end: float) -> list[dict[str, Any]]:
    """A panel's series over a range, each with the format of its legend."""
    found = []
    for target in panel.get("targets", []):
        expr = filled(target["expr"].replace("$__range", f"{int(end - begin)}s"), f"{15 * SCRAPE_S}s")
        body = urllib.parse.urlencode({"query": expr, "start": begin, "end": end, "step": STEP_S}).encode()
        with urllib.request.urlopen(f"{url}/api/v1/query_range", body, 30) as answer:
            result = json.load(answer)["data"]["result"]
        if target.get("instant"):  # Grafana asks for the end of the range alone
            result = [each for each in result if each["values"][-1][0] > end - STEP_S]
        found += [{"format": target["legendFormat"], **each} for each in result]
    return found


def drawn(
    browser: Browser,
    parts: tuple[str, str],
    board: dict[str, Any],
    series: dict[str, Any],
    span: tuple[float, float],
    out: Path,
) -> list[str]:
    """Draw a board in each theme into `out`; parts: script and styles. Returns what is wrong with its panels."""
    excused = {(each["board"], each["panel"]) for each in yaml.safe_load(MAY_BE_EMPTY.read_text(encoding="utf-8"))}
    name, faults, errors = board["uid"].removeprefix("kvrail-"), [], []
    for mode in MODES:
        page = browser.new_page(viewport={"width": 1440, "height": 900}, timezone_id="UTC")
        page.on("pageerror", lambda error, errors=errors: errors.append(error))
        page.route("**/*", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
        page.goto("http://localhost/")  # Grafana's components keep things for their origin
        page.add_script_tag(content=parts[0])
        page.add_style_tag(content=parts[1])
        found = page.evaluate("args => window.draw(...args)", [board, series, [1000 * each for each in span], mode])
        page.screenshot(path=out / f"{name}-{mode}.png", full_page=True)
        page.close()
        for title, wrong in found:
            faults += [
                f"{name} / {title}: {each}" for each in wrong if each != "no data" or (name, title) not in excused
            ]
    return list(dict.fromkeys([*faults, *(f"{name}: {error}" for error in errors)]))


def recorded(folder: Path, seconds: int, clients: int) -> dict[str, Any]:
    """Each board's series by panel, of a cluster under traffic that loses a worker, and the range that they span."""
    cluster = Cluster(folder / "log", "--prefill-workers", "2", "--decode-workers", "2")
    try:
        with prometheus(cluster.url, folder) as url:
            with traffic(cluster.url, clients):
                time.sleep(seconds / 2)
                kill_a_worker(cluster)
                time.sleep(seconds / 2)
                end = time.time()
            span = end - seconds, end
            boards = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in BOARDS.glob("*.json")}
            series = {
                name: {panel["id"]: asked(url, panel, *span) for panel in board["panels"]}
                for name, board in sorted(boards.items())
            }
            return {"boards": boards, "series": series, "span": span}
    finally:
        cluster.process.send_signal(signal.SIGTERM)
        cluster.process.wait(60)


def main() -> int:
    """Returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--seconds", type=int, default=90, help="of traffic; a worker is killed after half of them")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="draw what the last call recorded in that folder")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "series.json"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        parts = bundle(folder)
        if not options.again:
            kept.write_text(json.dumps(recorded(folder, options.seconds, options.clients)), encoding="utf-8")
    data = json.loads(kept.read_text(encoding="utf-8"))
    with sync_playwright() as driver:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=chromium, args=flags)
        faults = [
            line
            for name, board in sorted(data["boards"].items())
            for line in drawn(browser, parts, board, data["series"][name], data["span"], options.out)
        ]
        browser.close()
    for line in faults or ["every panel is drawn, with data, names and units"]:
        log.info("%s", line)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
