"""`make lines`: what counts as shipped code, its budgets, and the difference to another commit."""

import runpy
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "lines.py"))


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def write(folder, sizes):
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n" * size)


def test_lines_by_room_and_their_difference(tmp_path):
    git(tmp_path, "init")
    write(tmp_path, {"kvrail/errors.py": 3, "kvrail/engine/kv/a.py": 10, "kvrail/wire/v1/x.py": 99, "tests/a.py": 99})
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    write(tmp_path, {"kvrail/engine/kv/a.py": 4, "kvrail/codec/k.cu": 5, "kvrail/codec/README.md": 99})
    git(tmp_path, "add", ".")
    allowed = {"kvrail": 5, "kvrail/codec": 5, "kvrail/engine": 20}
    rows = SCRIPT["table"](SCRIPT["lines"](tmp_path), SCRIPT["lines"](tmp_path, "HEAD"), allowed)
    assert [row.split() for row in rows] == [
        ["kvrail", "3", "5", "+0"],
        ["kvrail/codec", "5", "5", "+5"],
        ["kvrail/engine", "4", "20", "-6"],
        ["total", "12", "30", "-1"],
    ]
    assert SCRIPT["table"](SCRIPT["lines"](tmp_path), None, allowed)[-1].split() == ["total", "12", "30"]


def test_each_room_keeps_its_budget():
    assert SCRIPT["over_budget"](SCRIPT["lines"](ROOT), SCRIPT["budgets"](ROOT)) == []


def test_a_budget_can_be_broken():
    assert SCRIPT["over_budget"]({"a": 11, "b": 1}, {"a": 10, "c": 5}) == [
        "a has 11 lines, its budget is 10",
        "b has no budget",
        "c has a budget and no lines",
    ]
