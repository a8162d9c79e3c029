"""Files that are read again when they change, while the process runs."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from kvrail.errors import ConfigError

log = logging.getLogger("kvrail.watched")

T = TypeVar("T")

LOOK_EVERY_S = 1.0
"""Shortest time between two checks of the files."""
RETRY_PAUSE = 100
"""Readings that fit between two of the same files that are no good: many keys take a while."""


class Watched(Generic[T]):
    """What some files hold, by `read`; where a change is no good, what they held before it. Any thread may ask."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Read them. Raises what `read` raises; later its ConfigErrors are logged, and `on_failure` is called."""
        self._paths, self._read_all = tuple(paths), read
        self.on_failure: Callable[[], object] = lambda: None
        self._looked = monotonic()
        self._seen = self._stat()
        self._failed, self._again = (self._seen, ""), 0.0  # what was no good, and why; when to try that again
        self._value = read()

    def get(self) -> T:
        """What they hold."""
        now = monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return self._value
        self._looked = now
        seen = self._stat()
        if seen != self._seen and (seen != self._failed[0] or now >= self._again):
            names = ", ".join(path.name for path in self._paths)
            try:
                self._value = self._read_all()
                self._seen, self._failed = seen, (seen, "")
                log.info("%s reloaded", names)
            except ConfigError as error:  # perhaps half written, or not valid yet: tried again
                self._again = now + RETRY_PAUSE * (monotonic() - now)
                if self._failed != (seen, str(error)):
                    self._failed = seen, str(error)
                    log.error("%s: reload failed, keeping the previous version: %s", names, error)
                    self.on_failure()
        return self._value

    def _stat(self) -> list[tuple[int, int, int, int]]:
        """What changes with a file. Links are followed: a mount of Kubernetes swaps one."""
        found = []
        for path in self._paths:
            try:
                about = path.stat()
            except OSError:
                found.append((0, 0, 0, 0))
            else:
                found.append((about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino))
        return found


def content_of(flag: str, path: Path) -> bytes:
    """A file that a setting names. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        remedy = "let this process's user read it" if isinstance(error, PermissionError) else "name a file"
        raise ConfigError(f"{flag} {path}: {error.strerror}; {remedy}") from None
