"""Holds on pages that a transfer reads or writes; they last even if the request ends before."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrail.engine.kv.pages import PagePool


@dataclass(frozen=True, slots=True)
class PageLease:
    """A hold on a request's pages by a transfer, which reads or writes them beside the engine.

    The pages are not reused until the lease is released, whatever becomes of the request.
    """

    pages: tuple[int, ...]


class Leases:
    """The leases of one engine. Each exists from a request's admission on; its transfer claims and releases it.

    It has no lock of its own: the engine calls it with its lock held.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._unclaimed: dict[str, PageLease] = {}
        self._claimed = 0

    @property
    def any(self) -> bool:
        """Whether any pages are held."""
        return bool(self._unclaimed or self._claimed)

    def take(self, request_id: str, page_table: Sequence[int]) -> None:
        """Hold a request's pages until a transfer claims them."""
        pages = tuple(page_table)
        self._pool.lease(pages)
        self._unclaimed[request_id] = PageLease(pages)

    def claim(self, request_id: str) -> PageLease | None:
        """Take over the hold on an admitted request's pages; None where the request has been dropped."""
        lease = self._unclaimed.pop(request_id, None)
        self._claimed += lease is not None
        return lease

    def release(self, lease: PageLease) -> None:
        """A transfer no longer reads or writes the pages."""
        self._pool.end_lease(lease.pages)
        self._claimed -= 1

    def drop(self, request_id: str) -> None:
        """Give back an unclaimed lease, if there is one."""
        lease = self._unclaimed.pop(request_id, None)
        if lease is not None:
            self._pool.end_lease(lease.pages)
