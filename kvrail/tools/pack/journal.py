"""What is done of a folder that is being made, so that a run that was killed goes on where it stopped.

OUT is made as OUT.partial and renamed when it is complete: under its own name nothing is ever half written. Beside it
lies OUT.journal: its first line names the job, each further one names a part of a file that is written. It
needs no care when it is written: a part is believed only where its bytes have the digest in the journal.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvrail.engine.model.header import are_sizes, parse_json, shown
from kvrail.errors import ConfigError
from kvrail.worker.packed.file import digest


@dataclass(frozen=True, slots=True)
class Written:
    """A part of a file: its place, its XXH3-64, and what else its maker must know of it."""

    offset: int
    size: int
    digest: int
    note: tuple[int, ...] = ()


class Journal:
    """The journal of one job; made by `work_on`."""

    def __init__(self, folder: Path, file: BinaryIO, written: Sequence[tuple[str, Written]]) -> None:
        self.folder = folder
        self._file = file
        self._written: dict[str, list[Written]] = {}
        for name, part in written:
            self._written.setdefault(name, []).append(part)

    def resume(self, name: str, head: bytes, fits: Callable[[int, Written], bool]) -> tuple[BinaryIO, list[Written]]:
        """The file `name` of the folder, open behind `head` and those of its parts that are there, and these parts.

        fits: whether a part is one that the file has as its part of that number.
        """
        path = self.folder / name
        file = path.open("r+b" if path.exists() else "w+b")
        size, end = path.stat().st_size, len(head)
        file.write(head)
        whole: list[Written] = []
        for part in self._written.get(name, ()):
            if part.offset != end or end + part.size > size or not fits(len(whole), part):
                break
            file.seek(end)
            if digest(file.read(part.size)) != part.digest:
                break
            whole.append(part)
            end += part.size
        file.seek(end)
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
    partial, path = Path(f"{out}.partial"), Path(f"{out}.journal")  # OUT may be "." or "/", which have no name
    first = json.dumps(identity, sort_keys=True).encode()
    if out.exists() and not path.exists():
        raise ConfigError(f"OUT {out} exists already; name another folder or delete it")
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is at work on {out}; wait for it or name another folder") from None
        lines = _whole_lines(file)
        if lines and lines[0] != first:
            raise ConfigError(
                f"{partial} was begun by another run, of another model, base or command; delete it and {path}, or name"
                " another folder"
            )
        if not lines and (found := next((each for each in (out, partial) if each.exists()), None)):
            path.unlink()
            raise ConfigError(f"{found} exists, and no journal names it; name another folder or delete it")
        if out.exists():  # all but the journal was done when the run was stopped
            path.unlink()
            yield None
            return
        if not lines:
            file.write(first + b"\n")
            file.flush()
        partial.mkdir(exist_ok=True)
        yield Journal(partial, file, [_written(line, path) for line in lines[1:]])
        sync_folder(partial)
        partial.rename(out)
        sync_folder(out.parent)
        path.unlink()


def _whole_lines(file: BinaryIO) -> list[bytes]:
    """Whole lines of a journal; what was not written to its end is cut off."""
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    file.truncate(len(whole))
    file.seek(len(whole))
    return whole.splitlines()


def _written(line: bytes, path: Path) -> tuple[str, Written]:
    """A file's name and its part, of a line of a journal. Raises ConfigError."""
    try:
        found = parse_json(line)
    except ValueError as error:
        found = str(error)
    match found:
        case [str(name), offset, size, int(check), list(note)] if are_sizes(offset, size):
            if all(type(each) is int for each in note):
                return name, Written(offset, size, check, tuple(note))
    raise ConfigError(f"{path} is damaged: it names a part {shown(found)}; delete it and the folder beside it")


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


def other_files(source: Path, made_of: set[Path]) -> list[Path]:
    """The files of a folder but those in `made_of`, with those of the folders below.

    Raises ConfigError for what would not be copied as it is: a link to a folder, to nothing or out of `source`, a pipe.
    A snapshot of the Hub's cache may have links to the files of that cache.
    """
    home = source.resolve()
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    found = []
    for path in sorted(source.rglob("*")):
        if path in made_of or (path.is_dir() and not path.is_symlink()):
            continue
        if not path.is_file():
            raise ConfigError(f"{path} is neither file nor folder; put a copy of what it stands for in its place")
        if not any(path.resolve().is_relative_to(each) for each in homes):
            raise ConfigError(f"{path} is a link out of {source}; put a copy of the file in its place")
        found.append(path)
    return found


def copy_files(source: Path, target: Path, files: Sequence[Path]) -> None:
    """Copy `files`, which lie in or below the folder `source`, to their places in `target`."""
    for path in files:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)  # of a run before: it may be read-only
        with path.open("rb") as read, copy.open("xb") as file:
            shutil.copyfileobj(read, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.copystat(path, copy)
