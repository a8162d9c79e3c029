"""docs/metrics.md says what the code does."""

import runpy
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(ROOT / "scripts" / "metrics_page.py"))


def test_the_page_is_current(script):
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["written"](page) == page, "run make docs-metrics"
    changed = page.replace("| `kvrail_failovers_total` |", "| `kvrail_moves_total` |")
    assert changed != page and script["written"](changed) == page


def test_a_page_without_a_place_for_a_table_is_refused(script):
    with pytest.raises(SystemExit, match="no place for the table"):
        script["written"]("# Metrics\n")


def test_the_librarys_metrics_are_those_that_the_page_names(script):
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    shown = {(f"{each.name}_total" if each.type == "counter" else each.name, each.type) for each in registry.collect()}
    assert {row[:2] for row in script["PROCESS"]} == shown
