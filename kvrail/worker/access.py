"""What a service may do with its worker's engine: open requests, and lease the pages of one for a transfer."""

from dataclasses import dataclass

from kvrail.engine.aio import EventRouter
from kvrail.engine.engine import Engine
from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.kv.leases import PageLease
from kvrail.transfer.streams import SideStream
from kvrail.values.layout import KVLayout
from kvrail.worker.pages import LeasedPages


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """An engine, its pages, and the stream on which transfers work beside it."""

    engine: Engine
    events: EventRouter
    cache: PagedCache
    side: SideStream

    @property
    def layout(self) -> KVLayout:
        """The pages' layout."""
        return self.cache.layout

    def pages(self, lease: PageLease, num_tokens: int) -> LeasedPages:
        """Leased pages of a prompt of `num_tokens` tokens as a transfer's source or sink."""
        return LeasedPages(self.cache, self.side, lease.pages, num_tokens)
