"""What is done of a folder that is being made, so that a run that was killed goes on where it stopped.

OUT is made as OUT.partial and renamed when it is complete: under its own name nothing is ever half written. Beside it
lies OUT.journal: its first line says of which job it is, each further one names a part of a file that is written. It
needs no care when it is written: a part is believed only where its bytes have the digest that the journal tells.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvrail.errors import ConfigError
from kvrail.services.packed.file import digest


@dataclass(frozen=True, slots=True)
class Written:
    """A part of a file: its place, its XXH3-64, and what else its maker must know of it."""

    offset: int
    size: int
    digest: int
    note: tuple[int, ...] = ()


class Journal:
    """The journal of one job; made by `work_on`."""

    def __init__(self, folder: Path, file: BinaryIO, lines: Sequence[list[Any]]) -> None:
        self.folder = folder
        self._file = file
        self._written: dict[str, list[Written]] = {}
        for name, offset, size, check, note in lines:
            self._written.setdefault(name, []).append(Written(offset, size, check, tuple(note)))

    def resume(self, name: str) -> tuple[BinaryIO, list[Written]]:
        """The file `name` of the folder, open behind those of its parts that are there, and these parts."""
        path = self.folder / name
        file = path.open("r+b" if path.exists() else "w+b")
        whole: list[Written] = []
        for part in self._written.get(name, ()):
            file.seek(part.offset)
            expected = whole[-1].offset + whole[-1].size if whole else part.offset
            if part.offset != expected or digest(file.read(part.size)) != part.digest:
                break
            whole.append(part)
        file.seek(whole[-1].offset + whole[-1].size if whole else 0)
        file.truncate()
        return file, whole

    def add(self, name: str, file: BinaryIO, part: Written) -> None:
        """Tell of a part that has been written to `file`."""
        file.flush()
        self._file.write(json.dumps([name, *astuple(part)]).encode() + b"\n")
        self._file.flush()


@contextmanager
def work_on(out: Path, identity: dict[str, Any]) -> Iterator[Journal | None]:
    """Make the folder `out`: gives the journal of its unfinished form; when the block ends well, gives it its name.

    identity: what the folder is made of. None is given where `out` is complete already and only its journal was left.
    Raises ConfigError where `out` exists, another process works on it, or what lies there is of another job.
    """
    partial, path = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.journal")
    first = json.dumps(identity, sort_keys=True)
    if out.exists() and not path.exists():
        raise ConfigError(f"OUT {out} exists already; name another folder or delete it")
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is at work on {out}; wait for it or name another folder") from None
        lines = _read(file)
        if lines and lines[0] != first:
            raise ConfigError(
                f"{partial} was begun by another run, of another model, base or command; delete it and {path}, or name"
                " another folder"
            )
        if not lines and (found := next((each for each in (out, partial) if each.exists()), None)):
            path.unlink()
            raise ConfigError(f"{found} exists, and no journal tells of it; name another folder or delete it")
        if out.exists():  # all but the journal was done when the run was stopped
            path.unlink()
            yield None
            return
        if not lines:
            file.write(first.encode() + b"\n")
            file.flush()
        partial.mkdir(exist_ok=True)
        yield Journal(partial, file, [json.loads(line) for line in lines[1:]])
        sync_folder(partial)
        partial.rename(out)
        sync_folder(out.parent)
        path.unlink()


def _read(file: BinaryIO) -> list[str]:
    """Whole lines of a journal; what was not written to its end is cut off."""
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    file.truncate(len(whole))
    file.seek(len(whole))
    return whole.decode().splitlines()


def complete(file: BinaryIO) -> None:
    """Have all of a file on the disk, and close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def sync_folder(folder: Path) -> None:
    """Have a folder's names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copy_others(source: Path, target: Path, made_of: set[Path]) -> None:
    """Copy the files of a folder but those in `made_of`, with those of the folders below."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and path not in made_of:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
            with copy.open("r+b") as file:
                os.fsync(file.fileno())
