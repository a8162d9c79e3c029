"""Of which code a result is: git's own ids of the folders that only a GPU runs, computed without git."""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gpu-smoke.json"
ROOMS = ("kvrail/engine", "kvrail/codec", "kvrail/transfer", "kvrail/transport")


def tree_id(folder: Path) -> str:
    """What `git rev-parse HEAD:folder` prints once the folder is committed as it is."""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix == ".pyc" or (path.is_dir() and not any(_files(path))):
            continue
        name = path.name.encode()
        if path.is_dir():
            entries.append((name + b"/", b"40000 " + name + b"\0" + bytes.fromhex(tree_id(path))))
        else:
            mode = b"100755 " if path.stat().st_mode & 0o100 else b"100644 "
            entries.append((name, mode + name + b"\0" + bytes.fromhex(_object_id(b"blob", path.read_bytes()))))
    return _object_id(b"tree", b"".join(entry for _, entry in sorted(entries)))


def trees() -> dict[str, str]:
    """Of each of ROOMS."""
    return {room: tree_id(ROOT / room) for room in ROOMS}


def state() -> tuple[bool, str]:
    """Whether the newest result is green and of the code at hand, and a line that says so."""
    if not RESULT.exists():
        return False, f"no result: run make gpu-smoke on a machine with a GPU, and commit {RESULT.relative_to(ROOT)}"
    found = json.loads(RESULT.read_text())
    what = f"{found['date']}, {found['card']}, commit {found['commit']}: {found['summary']}"
    other = [room for room, tree in trees().items() if found["trees"].get(room) != tree]
    if other:
        return False, f"{what}; not of the code at hand: {', '.join(other)} changed since; run make gpu-smoke again"
    return bool(found["green"]), f"{what}; of the code at hand"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]


def _object_id(kind: bytes, content: bytes) -> str:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
