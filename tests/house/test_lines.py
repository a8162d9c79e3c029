"""`make lines`: what counts as shipped code, and the difference to another commit."""

import runpy
import subprocess
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "lines.py"))


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
    rows = SCRIPT["table"](SCRIPT["lines"](tmp_path), SCRIPT["lines"](tmp_path, "HEAD"))
    assert [row.split() for row in rows] == [
        ["kvrail", "3", "+0"],
        ["kvrail/codec", "5", "+5"],
        ["kvrail/engine", "4", "-6"],
        ["total", "12", "-1"],
    ]
    assert [row.split() for row in SCRIPT["table"](SCRIPT["lines"](tmp_path), None)][-1] == ["total", "12"]
