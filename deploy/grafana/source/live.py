"""Asks a live Prometheus every query of the boards and rules: python -m deploy.grafana.source.live URL.

A query that fails, a panel without any series and a legend that names a label that no series has are faults; so is an
entry of may_be_empty.yml that names nothing. Alerts are to have no series: of theirs each metric is looked for instead.
"""

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2]
BOARDS = DEPLOY / "grafana" / "boards"
RULES = DEPLOY / "prometheus" / "rules"
MAY_BE_EMPTY = Path(__file__).with_name("may_be_empty.yml")
METRIC = re.compile(r"\b(?:kvrail|process)_[a-z0-9_]+\b(?!\s*=)")
RECORDED = re.compile(r"\b[a-z_]+:kvrail_[a-z0-9_:]+")
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One query. place: board or rule file, and panel or rule, as may_be_empty.yml names them."""

    place: tuple[str, str]
    expr: str
    legend: str = ""


def panel_queries() -> Iterator[Asked]:
    """Every panel's queries, as Grafana would fill in its variables."""
    for path in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                yield Asked((path.stem, panel["title"]), target["expr"], target["legendFormat"])


def rules() -> Iterator[dict[str, Any]]:
    """Every rule of the rule files."""
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def rule_queries() -> Iterator[Asked]:
    """What recording rules record, each alert's query, and the metrics that alerts look at."""
    for rule in rules():
        if "record" in rule:
            yield Asked(("rules", rule["record"]), rule["record"])
        else:
            for name in sorted(
                set(METRIC.findall(RECORDED.sub("", rule["expr"]))) | set(RECORDED.findall(rule["expr"]))
            ):
                yield Asked(("rules", rule["alert"]), f"count({name})")


def alert_queries() -> Iterator[Asked]:
    """Alerts' own queries, which must be understood and may well have no series."""
    for rule in rules():
        if "alert" in rule:
            yield Asked(("rules", rule["alert"]), rule["expr"])


def mark_queries() -> Iterator[Asked]:
    """Queries of the marks on panels (annotations), which have series only when something happened."""
    for path in sorted(BOARDS.glob("*.json")):
        for mark in json.loads(path.read_text(encoding="utf-8"))["annotations"]["list"]:
            yield Asked((path.stem, mark["name"]), mark["expr"])


def filled(expr: str, window: str) -> str:
    """A query with everything in place of the boards' variables, and `window` in place of Grafana's ranges."""
    for name in ("$__rate_interval", "$__range"):
        expr = expr.replace(name, window)
    return expr.replace("$model", ".*").replace("$worker", ".*")


def ask(url: str, expr: str) -> list[dict[str, Any]]:
    """The series of an instant query, each with `metric`, its labels, and `value`: a time and a number in a string.

    Raises ValueError with what Prometheus says against it.
    """
    body = urllib.parse.urlencode({"query": expr}).encode()
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query", body, TIMEOUT_S) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]) from error


def faults(url: str, window: str = "1m") -> list[str]:
    """What is wrong, a line each. window: of rates; at least four scrapes."""
    entries = yaml.safe_load(MAY_BE_EMPTY.read_text(encoding="utf-8"))
    excused = {(entry["board"], entry["panel"]) for entry in entries}
    found, named = [], set()
    shown: Iterable[Asked] = [*panel_queries(), *rule_queries()]
    for asked in shown:
        named.add(asked.place)
        found += _faults_of(url, asked, filled(asked.expr, window), asked.place in excused)
    for asked in (*alert_queries(), *mark_queries()):
        found += _faults_of(url, asked, filled(asked.expr, window), True)
    return found + [
        f"may_be_empty.yml names {' / '.join(place)}, which is nowhere" for place in sorted(excused - named)
    ]


def _faults_of(url: str, asked: Asked, expr: str, excused: bool) -> list[str]:
    place = " / ".join(asked.place)
    try:
        series = ask(url, expr)
    except ValueError as error:
        return [f"{place}: {error}: {expr}"]
    if not series:
        return [] if excused else [f"{place}: no series: {expr}"]
    labels = re.findall(r"{{(\w+)}}", asked.legend)
    lacking = [label for label in labels if not any(label in each["metric"] for each in series)]
    return [f"{place}: no series has the label {label} of the legend" for label in lacking]


if __name__ == "__main__":
    lines = faults(sys.argv[1].rstrip("/"), *sys.argv[2:3])
    sys.stdout.writelines(f"{line}\n" for line in lines or ["every query has an answer"])
    sys.exit(bool(lines))
