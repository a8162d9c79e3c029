"""Runs `kvrail pack` and `kvrail unpack`: progress on a terminal, one line at the end."""

import errno
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvrail.errors import ConfigError, KvrailError
from kvrail.runtime import logs
from kvrail.runtime.progress import lines_while
from kvrail.tools.pack.packing import Sizes, pack
from kvrail.tools.pack.unpacking import unpack
from kvrail.worker.packed.file import SUFFIX, PackedFile
from kvrail.worker.packed.source import WEIGHTS

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for: folders, and whether what is written is read again and compared."""

    source: Path
    out: Path
    base: Path | None
    verify: bool


def run_pack(options: Options) -> int:
    """Pack; returns the exit status. Raises KvrailError."""
    sizes, seconds = _with_progress("packing", options, pack, _plain_bytes)
    share = sizes.packed / sizes.plain
    sys.stdout.write(
        f"packed {sizes.plain:,} bytes of weights into {sizes.packed:,} ({share:.1%}) in {seconds:.1f} s:"
        f" {options.out}\n"
    )
    return 0


def run_unpack(options: Options) -> int:
    """Unpack; returns the exit status. Raises KvrailError."""
    sizes, seconds = _with_progress("unpacking", options, unpack, _unpacked_bytes)
    sys.stdout.write(f"unpacked {sizes.plain:,} bytes of weights in {seconds:.1f} s: {options.out}\n")
    return 0


def _plain_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(WEIGHTS))


def _unpacked_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob(WEIGHTS + SUFFIX):
        with PackedFile(path) as packed:
            total += packed.header.file_bytes
    return total


def _with_progress(
    word: str, options: Options, work: Callable[..., Sizes], total: Callable[[Path], int]
) -> tuple[Sizes, float]:
    """What `work` came to, and the seconds it took; on stderr a bar where that is a terminal, else lines.

    total: how many bytes a folder's weights are, unpacked.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    begun = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        try:
            size = total(options.source)
            task = progress.add_task(word, total=size)
            at = progress.tasks[task]
            lines = lines_while(lambda: f"{word}: {at.completed / 1e9:.2f} of {size / 1e9:.2f} GB")
            with logs.shown_on(sys.stderr), lines if progress.disable else nullcontext():
                sizes = work(
                    options.source,
                    options.out,
                    options.base,
                    verify=options.verify,
                    advance=lambda done: progress.advance(task, done),
                )
        except OSError as error:
            raise _explained(error, options.out) from error
    return sizes, time.monotonic() - begun


def _explained(error: OSError, out: Path) -> KvrailError:
    if error.errno in NO_ROOM:
        return KvrailError(
            f"no space is left for {out}: {error.strerror}; free some, and the same command goes on where it stopped"
        )
    what = error.filename or out
    return ConfigError(f"{what}: {error.strerror}; name folders that can be read, and one that can be written as OUT")
