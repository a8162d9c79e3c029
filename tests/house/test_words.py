"""The words of scripts/words.py stand nowhere, and a planted one is found."""

import runpy
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "words.py"))


def repository(folder, files):
    """A folder whose `files`, by path, git tracks."""
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return folder


def test_no_word_of_the_lists_stands_anywhere():
    assert SCRIPT["hits"](ROOT) == []


def test_a_planted_word_is_found(tmp_path):
    planted = {"kvrail/a.py": '"""It is read ' + 'anew."""\n', "docs/b.md": "A car" + "rier moves payloads.\n"}
    found = SCRIPT["hits"](repository(tmp_path, {**planted, "kvrail/c.py": '"""A step in flight."""\n'}))
    assert [hit.split(": ")[0] for hit in found] == ["docs/b.md:1", "kvrail/a.py:1"]


def test_tests_are_read_for_names_alone_and_history_for_nothing(tmp_path):
    text = "It is read " + "anew by a car" + "rier.\n"
    found = SCRIPT["hits"](
        repository(tmp_path, {"tests/a.py": text, "benchmarks/archive/1.md": text, "docs/decisions/1.md": text})
    )
    assert [hit.split(": ")[0] for hit in found] == ["tests/a.py:1"]
