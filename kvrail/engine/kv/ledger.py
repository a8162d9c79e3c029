"""Which pages' content is here, told in bounded pieces to whoever has heard a part of it already."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from kvrail.values.pagehash import PageHash, page_digest

REMEMBERED = 16384
"""Removals that are remembered; who has missed more begins anew."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """What a listener has heard: pages that came, and pages that went, up to these versions; 0: nothing yet."""

    added: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True)
class HeldPages:
    """News of pages, as digests. What went is to be applied before what came: a page may have come again.

    anew: forget what was told before. heard: where the next news begin. complete: there are no more now.
    """

    anew: bool
    heard: Cursor
    added: list[int]
    removed: list[int]
    complete: bool


class PageLedger:
    """Keeps count of pages that become known and are evicted; each such moment has a number, the version."""

    def __init__(self) -> None:
        self._version = 0
        self._held: dict[int, int] = {}  # digest -> version at which it came; in this order
        self._removed: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)  # version, digest
        self._forgotten = 0  # the newest removal that is remembered no more

    def __len__(self) -> int:
        return len(self._held)

    def add(self, page_hash: PageHash) -> None:
        """A page's content has become known."""
        self._version += 1
        digest = page_digest(page_hash)
        self._held.pop(digest, None)  # of another page with the same digest; the newest is to be the last
        self._held[digest] = self._version

    def remove(self, page_hash: PageHash) -> None:
        """It is here no more."""
        digest = page_digest(page_hash)
        self._held.pop(digest, None)
        self._version += 1
        if len(self._removed) == REMEMBERED:
            self._forgotten = self._removed[0][0]
        self._removed.append((self._version, digest))

    def news(self, heard: Cursor, limit: int) -> HeldPages:
        """At most `limit` digests that are new to who has heard so much; from the start where that is too long ago."""
        anew = not heard.added or heard.removed < self._forgotten or max(heard.added, heard.removed) > self._version
        if anew:
            heard = Cursor(0, self._version)
        removed = list(islice(self._removed_since(heard.removed), limit + 1))
        # Nothing is told to have come that may have gone and come again in what is not told yet.
        removed_to = removed[limit - 1][0] if len(removed) > limit else self._version
        removed = removed[:limit]
        waiting = list(islice(self._added_since(heard.added), limit - len(removed) + 1))
        added = [entry for entry in waiting[: limit - len(removed)] if entry[0] <= removed_to]
        complete = removed_to == self._version and len(added) == len(waiting)
        added_to = self._version if complete else added[-1][0] if added else heard.added
        digests = [digest for _, digest in added], [digest for _, digest in removed]
        return HeldPages(anew, Cursor(added_to, removed_to), *digests, complete)

    def _added_since(self, version: int) -> Iterator[tuple[int, int]]:
        """Oldest first. To find what is new the newest are looked at first: mostly it is little."""
        if not version:
            return ((at, digest) for digest, at in self._held.items())
        newest_first = ((at, digest) for digest, at in reversed(self._held.items()))
        return reversed(list(takewhile(lambda entry: entry[0] > version, newest_first)))

    def _removed_since(self, version: int) -> Iterator[tuple[int, int]]:
        return reversed(list(takewhile(lambda entry: entry[0] > version, reversed(self._removed))))
