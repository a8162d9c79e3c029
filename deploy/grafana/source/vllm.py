"""Asks a live Prometheus what vLLM's own Grafana dashboards would: python -m deploy.grafana.source.vllm URL.

vllm_boards.yml has their panels as facts; dashboards that were added to deploy/grafana/vllm are queried as they are.
Variables are filled in from that Prometheus as Grafana does. A query that fails, or has no series, or none with a
number, is a fault, but for the metrics that vllm_boards.yml lists as empty.
"""

import json
import math
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.source.live import DEPLOY, TIMEOUT_S, ask

FACTS = Path(__file__).with_name("vllm_boards.yml")
FILES = DEPLOY / "grafana" / "vllm"
METRIC = re.compile(r"\b(?:vllm:|http_)[a-z0-9_]+\b(?!\s*=)")
OVERVIEW = "vLLM / Overview"
INTERVALS = {"__interval": "5s", "__rate_interval": "20s", "__range": "1h"}
"""What Grafana makes of scrapes every 5 s and the dashboards' hour: four scrapes, and the hour."""
FORMS = {
    r"each": "M{S}",
    r"(sum|max|avg|min|count)": r"\1(M{S})",
    r"each-rate": "rate(M{S}[R])",
    r"rate": "sum(rate(M{S}[R]))",
    r"by-(\w+)-(rate|increase)": r"sum by (\1) (\2(M{S}[R]))",
    r"by-(\w+)-share": r"sum by (\1) (rate(M{S}[R])) / ignoring (\1) group_left () (sum(rate(M{S}[R])) > 0)",
    r"by-(\w+)-mean": r"sum by (\1) (rate(M_sum{S}[R])) / (sum by (\1) (rate(M_count{S}[R])) > 0)",
    r"le-(rate|increase)": r"sum by (le) (\1(M_bucket{S}[R]))",
    r"le-share": "sum by (le) (increase(M_bucket{S}[W])) / on () group_left () (sum(increase(M_count{S}[W])) > 0)",
    r"p(\d+)": r"histogram_quantile(0.\1, sum by (le) (rate(M_bucket{S}[R])))",
    r"range-p(\d+)": r"histogram_quantile(0.\1, sum by (le) (rate(M_bucket{S}[W])))",
    r"mean": "sum(rate(M_sum{S}[R])) / (sum(rate(M_count{S}[R])) > 0)",
    r"each-mean": "rate(M_sum{S}[R]) / rate(M_count{S}[R])",
    r"range-mean": "sum(increase(M_sum{S}[W])) / sum(increase(M_count{S}[W]))",
    r"hits": "sum(rate(vllm:M_hits_total{S}[R])) / (sum(rate(vllm:M_queries_total{S}[R])) > 0)",
    r"within-(\w+)": r'sum(rate(M_bucket{S, le="$\1"}[R])) / (sum(rate(M_count{S}[R])) > 0)',
    r"share-or-0": "(sum(rate(M{S, L}[R])) or vector(0)) / (sum(rate(M{S}[R])) > 0)",
    r"per-request": "sum(rate(M{S}[R])) / sum(rate(vllm:request_success_total{S}[R]))",
    r"down": 'count(up{job=~"$job"} == 0) or vector(0)',
    r"models-p(\d+)": r"histogram_quantile(0.\1, sum by (le, model_name) (rate(M_bucket{S}[R])))",
    r"models-le-rate": "sum by (le, model_name) (rate(M_bucket{S}[R]))",
    r"models-range-p(\d+)": r"histogram_quantile(0.\1, sum by (le, model_name) (rate(M_bucket{S}[W])))",
    r"models-range-rate": "sum by (model_name) (rate(M{S}[W]))",
    r"models-range-increase": "round(sum by (model_name) (increase(M{S}[W])))",
    r"models-range-peak": "max by (model_name) (max_over_time(M{S}[W]))",
    r"models-range-share": ("sum by (model_name) (rate(M{S, L}[W])) / (sum by (model_name) (rate(M{S}[W])) > 0)"),
    r"models-instances": "count by (model_name) (group by (model_name, instance) (last_over_time(M{S}[W])))",
}
"""PromQL of each form. M: the metric; S: what the board selects; L: label and value, where some braces have none; R, W:
Grafana's ranges."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One query of a panel, with the board's variables in it."""

    panel: str
    expr: str


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard: its queries, and its variables: a constant, or label_values(...) and whether all of them."""

    name: str
    variables: dict[str, str | tuple[str, bool]]
    queries: tuple[Asked, ...]


def empty() -> dict[str, str]:
    """Metrics that no series has here, and why."""
    listed: dict[str, str] = _facts()["empty"]
    return listed


def boards() -> Iterator[Board]:
    """What vllm_boards.yml says, then the dashboards in FILES."""
    for about in _facts()["boards"]:
        queries = (each for panel, items in about["panels"].items() for each in _all_written(about, panel, items))
        variables = {
            name: how if isinstance(how, str) else (how["values"], how.get("all", False))
            for name, how in about["variables"].items()
        }
        yield Board(about["board"], variables, tuple(queries))
    for path in sorted(FILES.glob("*.json")):
        yield of_grafana(json.loads(path.read_text(encoding="utf-8")))


def of_grafana(dashboard: dict[str, Any]) -> Board:
    """A dashboard as Grafana exports it."""
    variables: dict[str, str | tuple[str, bool]] = {}
    for each in dashboard["templating"]["list"]:
        query = each.get("definition") or each.get("query")
        if each["type"] == "query" and query:
            variables[each["name"]] = query, each.get("includeAll", False)
        elif each["type"] == "custom":
            variables[each["name"]] = str(each["current"]["value"])
    panels = [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", ()))]
    queries = (Asked(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ()))
    return Board(dashboard["title"], variables, tuple(queries))


def _facts() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FACTS.read_text(encoding="utf-8"))
    return found


def _all_written(about: dict[str, Any], panel: str, items: Iterable[str]) -> Iterator[Asked]:
    return (asked for item in items for asked in _written(about, panel, item))


def _written(about: dict[str, Any], panel: str, item: str) -> Iterator[Asked]:
    """The queries of `FORM ... METRIC LABEL=VALUE`."""
    words = item.split()
    name, _, value = words.pop().partition("=") if "=" in words[-1] else ("", "", "")
    label = f'{name}="{value}"' if name else ""
    *forms, metric = words
    http = metric.startswith("http_")
    selected = about["http" if http else "select"]
    for form in forms:
        expr = _promql(form).replace("vllm:M_", f"vllm:{metric}_")
        expr = re.sub(r"(?<!:)\bM(?=[_{])", metric if http else f"vllm:{metric}", expr)
        expr = expr.replace("[R]", "[$__rate_interval]").replace("[W]", "[$__range]")
        both = ", ".join(filter(None, [selected, label]))
        whole = selected if "L}" in expr else both
        yield Asked(panel, expr.replace("{S, L", "{" + both).replace("{S", "{" + whole))


def _promql(form: str) -> str:
    (found,) = (re.sub(kind, text, form) for kind, text in FORMS.items() if re.fullmatch(kind, form))
    return found


def names() -> set[str]:
    """Every metric that these dashboards ask for."""
    return {name for board in boards() for asked in board.queries for name in METRIC.findall(asked.expr)}


def values_of(url: str, board: Board) -> dict[str, str]:
    """What Grafana fills in for a board's variables at this Prometheus."""
    found: dict[str, str] = {}
    for name, how in board.variables.items():
        if isinstance(how, str):
            found[name] = how
            continue
        query, every = how
        match = re.fullmatch(r"label_values\((?:(.+),\s*)?(\w+)\)", query)
        assert match is not None, query
        selector = {"match[]": filled(match[1], found)} if match[1] else {}
        path = f"{url}/api/v1/label/{match[2]}/values?{urllib.parse.urlencode(selector)}"
        with urllib.request.urlopen(path, timeout=TIMEOUT_S) as answer:
            values = sorted(json.load(answer)["data"])
        found[name] = "(" + "|".join(map(_quoted, values)) + ")" if every else (values or [""])[0]
    return found


def _quoted(value: str) -> str:
    """A value within a regular expression within PromQL's quotes."""
    return re.escape(value).replace("\\-", "-").replace("\\", "\\\\")


def filled(expr: str, values: dict[str, str]) -> str:
    """A query with everything in place of its variables."""
    return re.sub(r"\$(?:\{(\w+)[^}]*\}|(\w+))", lambda match: (INTERVALS | values)[match[1] or match[2]], expr)


def panel(url: str, board: str, title: str) -> list[float]:
    """What one panel of a board shows: the numbers of each of its queries' series."""
    (found,) = (each for each in boards() if each.name == board)
    values = values_of(url, found)
    return [
        number
        for asked in found.queries
        if asked.panel == title
        for number in _numbers(url, filled(asked.expr, values))
    ]


def _numbers(url: str, expr: str) -> list[float]:
    return [float(each["value"][1]) for each in ask(url, expr)]


def faults(url: str) -> list[str]:
    """What is wrong, a line each."""
    found, listed = [], empty()
    for board in boards():
        values = values_of(url, board)
        for asked in board.queries:
            expr = filled(asked.expr, values)
            place = f"{board.name} / {asked.panel}"
            excused = not listed.keys().isdisjoint(METRIC.findall(expr))
            try:
                numbers = _numbers(url, expr)
            except ValueError as error:
                found.append(f"{place}: {error}: {expr}")
                continue
            if excused and numbers:
                found.append(f"{place}: is listed as empty and has series: {expr}")
            elif not excused and all(map(math.isnan, numbers)):
                found.append(f"{place}: {'no numbers' if numbers else 'no series'}: {expr}")
    return found


if __name__ == "__main__":
    lines = faults(sys.argv[1].rstrip("/"))
    sys.stdout.writelines(f"{line}\n" for line in lines or ["every query has an answer"])
    sys.exit(bool(lines))
