"""docs/models.md and docs/performance.md say what the newest smoke run on a GPU says."""

import json
import runpy

import pytest

from tests.docs.test_docs import ROOT
from tests.smoke.models import ARCHITECTURES


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(ROOT / "scripts" / "models_page.py"))


@pytest.fixture
def results(script) -> dict:
    return json.loads(script["RESULTS"].read_text(encoding="utf-8"))


def test_the_pages_are_current(script, results):
    pages = script["pages"](list(ARCHITECTURES), results)
    for page, content in pages.items():
        assert page.read_text(encoding="utf-8") == content, "run make docs-models"
    for architecture in ARCHITECTURES:
        assert f"| `{architecture}` |" in pages[script["MODELS"]]


def test_a_failed_case_changes_both_pages(script, results):
    results["cases"] = [case for case in results["cases"] if case["case"] in ARCHITECTURES]
    results["cases"][0] |= {"faults": ["a request failed"], "differ": 1}
    pages = script["pages"](list(ARCHITECTURES), results)
    assert f"failed: {results['cases'][0]['case']}" in pages[script["PERFORMANCE"]]
    assert "requests alone: 1;" in pages[script["PERFORMANCE"]]
    assert "**fails**" in pages[script["MODELS"]]


def test_an_architecture_without_a_run_is_shown_as_such(script, results):
    assert "| `new` | new | | | | not run yet |" in script["table"](["new"], {**results, "cases": []})
