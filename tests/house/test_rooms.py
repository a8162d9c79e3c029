"""A folder is one subject: few files lie loose beside folders, and none holds more than can be seen at once."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOSE, FILES = 4, 14
CODE = {".cu", ".cuh", ".js", ".py"}
HALLS = ["kvrail", "kvrail/engine", "kvrail/services/router"]
"""Folders of rooms."""
GENERATED = "kvrail/wire/v1"


def code_in(folder):
    """Names of a folder's files of code, without those that only make it a package or a command."""
    return sorted(
        each.name
        for each in folder.iterdir()
        if each.suffix in CODE and each.name not in {"__init__.py", "__main__.py"}
    )


def folders():
    found = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "kvrail").rglob("*.py")}
    return sorted(found - {GENERATED})


@pytest.mark.parametrize("hall", HALLS)
def test_few_files_lie_loose_beside_rooms(hall):
    loose = code_in(ROOT / hall)
    assert len(loose) <= LOOSE, f"{hall} has {loose}: put what is more than {LOOSE} into a room"


@pytest.mark.parametrize("folder", folders())
def test_no_folder_is_too_full(folder):
    files = code_in(ROOT / folder)
    assert len(files) <= FILES, f"{folder} has {len(files)} files of code: split it by subject"


def test_every_room_says_what_it_is_for():
    silent = [
        each for each in folders() if not (ROOT / each / "__init__.py").read_text(encoding="utf-8").startswith('"""')
    ]
    assert silent == []


def test_what_counts(tmp_path):
    for name in ("__init__.py", "__main__.py", "py.typed", "a.py", "b.cu", "c.js", "README.md", "d.html"):
        (tmp_path / name).touch()
    assert code_in(tmp_path) == ["a.py", "b.cu", "c.js"]
