"""Where evicted pages go, and come back from: memory beyond the pool."""

from collections.abc import Sequence
from typing import Protocol

from kvrail.values.pagehash import PageHash


class KVTier(Protocol):
    """Keeps the content of pages under their hashes. It reads and writes pages of the pool by their numbers.

    `PagePool` calls it with the engine's lock held, on the engine's thread. Copies that it enqueues on the stream of
    the steps come before whatever the next step does to a page, so it need not wait for them. A tier that takes longer
    than a step to find a page again answers `lookup` with what it has at hand.
    """

    def lookup(self, hashes: Sequence[PageHash]) -> int:
        """How many of the leading pages `load` could bring back now."""
        ...

    def load(self, hashes: Sequence[PageHash], pages: Sequence[int]) -> None:
        """Write what `lookup` counted into these pages of the pool, bit for bit, all layers."""
        ...

    def store(self, page_hash: PageHash, page: int) -> None:
        """Keep the content of a page that is about to be reused; a tier without room keeps what it likes."""
        ...

    def drop(self, page_hash: PageHash) -> None:
        """Forget what is kept under a hash, if anything is: it is wrong."""
        ...
