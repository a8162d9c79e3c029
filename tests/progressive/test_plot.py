"""The plot of a benchmark's result: what it takes from the tables."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.progressive_plot import main, panels, points

HEADER = ["codec", "first token", "2 verified", "32 verified", "2 shown", "32 shown", "drafts"]
DRAFTS = ["splitzip-progressive-ans", "0.4", "1.5", "1.6", "0.5", "1.2", "40.0"]
PLAIN = ["raw", "0.3", "1.0", "2.0", "", "", ""]
TIMES = {"title": "4,096 tokens at 1gbit", "header": HEADER, "rows": [PLAIN, DRAFTS]}
RATIOS = {"title": "ratios", "header": ["codec", "2 shown, over raw"], "rows": [["raw", "1.00"]]}


def test_points_are_the_times_of_a_row():
    assert points(HEADER, PLAIN, "verified") == {1: 0.3, 2: 1.0, 32: 2.0}
    assert points(HEADER, PLAIN, "shown") == {}
    assert points(HEADER, DRAFTS, "shown") == {1: 0.4, 2: 0.5, 32: 1.2}


def test_ratios_are_no_times():
    assert panels({"tables": [TIMES, RATIOS, TIMES]}) == [TIMES, TIMES]


def test_a_result_becomes_a_drawing(tmp_path):
    path = tmp_path / "progressive.json"
    path.write_text(json.dumps({"hardware": "two GPUs", "date": "2026-01-01", "tables": [TIMES, RATIOS]}))
    assert main([str(path)]) == 0
    drawing = path.with_suffix(".svg").read_text()
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    assert all(f"<!-- {words} -->" in drawing for words in (TIMES["title"], "raw", "splitzip-progressive-ans"))


def test_a_result_without_times_is_refused(tmp_path):
    path = tmp_path / "drafts.json"
    path.write_text(json.dumps({"tables": [RATIOS]}))
    with pytest.raises(SystemExit, match="drafts has no table of times"):
        main([str(path)])
