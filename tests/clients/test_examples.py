"""The examples of the API's documentation run as they stand, but for the port, and answer what they say."""

import json
import re
import subprocess
import sys

import pytest

from tests.e2e.cluster import ROOT, Cluster

PAGES = ("api.md", "structured-output.md")
FENCE = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(language, code, id=f"{page}-{number}")
    for page in PAGES
    for number, (language, code) in enumerate(FENCE.findall((ROOT / "docs" / page).read_text(encoding="utf-8")))
]


def test_there_are_enough():
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_answers(cluster: Cluster, language: str, code: str):
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", cluster.url)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euc", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if language == "python":
        assert done.stdout.strip()
    elif '"stream": true' in code:
        events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["kvrail"]["stage_seconds"]
    else:
        answer = json.loads(done.stdout)
        assert "error" not in answer, answer
        if '"regex"' in code:
            assert re.fullmatch("[0-2][0-9]:[0-5][0-9]", answer["choices"][0]["message"]["content"])
        if "tool_choice" in code:
            (call, *_) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "look_up"
