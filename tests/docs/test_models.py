"""docs/models.md says what the newest smoke run on a GPU says, of each architecture that it tries."""

import json
import runpy

import pytest

from tests.docs.test_docs import ROOT
from tests.smoke.models import ARCHITECTURES


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(ROOT / "scripts" / "models_page.py"))


def test_the_page_is_current(script):
    page = script["PAGE"].read_text(encoding="utf-8")
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))
    assert script["written"](page, list(ARCHITECTURES), results) == page, "run make docs-models"
    for architecture in ARCHITECTURES:
        assert f"| `{architecture}` |" in page
    results["cases"][0]["faults"] = ["a request failed"]
    assert script["written"](page, list(ARCHITECTURES), results) != page


def test_an_architecture_without_a_run_is_shown_as_such(script):
    assert "| `new` | new | | | | not run yet |" in script["table"](
        ["new"], {**json.loads(script["RESULTS"].read_text(encoding="utf-8")), "cases": []}
    )
