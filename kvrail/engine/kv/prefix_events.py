"""KV events: which pages the prefix cache has stored and removed, for routers to read in bounded parts."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from kvrail.values.pagehash import PageHash, page_digest

REMEMBERED = 16384
"""Removals that are kept; a reader that has missed more of them gets a snapshot."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader has come: versions up to which it has read stored and removed pages; 0: it has read nothing."""

    stored: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Events behind a cursor, as page digests. Apply `removed` before `stored`: a page may have come back.

    snapshot: the reader discards what it has read before. cursor: where the next events begin. complete: there are no
    more for now.
    """

    snapshot: bool
    cursor: Cursor
    stored: list[int]
    removed: list[int]
    complete: bool


class PrefixEvents:
    """Records each page that is stored or removed; each event has a number, its version."""

    def __init__(self) -> None:
        self._version = 0
        self._present: dict[int, int] = {}  # digest -> version at which it was stored; in this order
        self._removed: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)  # version, digest
        self._forgotten = 0  # version of the newest removal that is no longer kept

    def __len__(self) -> int:
        return len(self._present)

    def store(self, page_hash: PageHash) -> None:
        """Record that a page's content is in the prefix cache."""
        self._version += 1
        digest = page_digest(page_hash)
        self._present.pop(digest, None)  # another page with the same digest; the newest comes last
        self._present[digest] = self._version

    def remove(self, page_hash: PageHash) -> None:
        """Record that it no longer is."""
        digest = page_digest(page_hash)
        self._present.pop(digest, None)
        self._version += 1
        if len(self._removed) == REMEMBERED:
            self._forgotten = self._removed[0][0]
        self._removed.append((self._version, digest))

    def since(self, cursor: Cursor, limit: int) -> KVEvents:
        """At most `limit` events behind a cursor; a snapshot where the cursor is too old, or another process's."""
        snapshot = (
            not cursor.stored or cursor.removed < self._forgotten or max(cursor.stored, cursor.removed) > self._version
        )
        if snapshot:
            cursor = Cursor(0, self._version)
        removed = list(islice(self._removed_since(cursor.removed), limit + 1))
        # A page may be removed and stored again behind the last removal of this part: then its event waits.
        removed_to = removed[limit - 1][0] if len(removed) > limit else self._version
        removed = removed[:limit]
        waiting = list(islice(self._stored_since(cursor.stored), limit - len(removed) + 1))
        stored = [entry for entry in waiting[: limit - len(removed)] if entry[0] <= removed_to]
        complete = removed_to == self._version and len(stored) == len(waiting)
        stored_to = self._version if complete else stored[-1][0] if stored else cursor.stored
        digests = [digest for _, digest in stored], [digest for _, digest in removed]
        return KVEvents(snapshot, Cursor(stored_to, removed_to), *digests, complete)

    def _stored_since(self, version: int) -> Iterator[tuple[int, int]]:
        """Oldest first. The search begins with the newest, since few are new in most cases."""
        if not version:
            return ((at, digest) for digest, at in self._present.items())
        newest_first = ((at, digest) for digest, at in reversed(self._present.items()))
        return reversed(list(takewhile(lambda entry: entry[0] > version, newest_first)))

    def _removed_since(self, version: int) -> Iterator[tuple[int, int]]:
        return reversed(list(takewhile(lambda entry: entry[0] > version, reversed(self._removed))))
