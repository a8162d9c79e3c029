"""The sending end of one transfer."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch

from kvrail.errors import reason_of
from kvrail.kv.attempt import Attempt
from kvrail.kv.messages import Accepted, End, GivenUp, Offer, Working, pack
from kvrail.runtime.waiting import in_thread, settled
from kvrail.transfer.pieces import Piece
from kvrail.transfer.pool_pages import PoolPages
from kvrail.transfer.route import Route
from kvrail.transfer.send_queue import SendQueue
from kvrail.transfer.sending import Outgoing, PageSender
from kvrail.transport.base import Announcement

HEARTBEAT_S = 2.0
"""How often this end says that it is at work: it computes, compiles, or other transfers go first."""


class Sending(Attempt):
    """Pages on their way out. Made by `KVEndpoint.send`; max_frame_bytes, frame_layers: what both ends take."""

    def __init__(
        self,
        offer: Offer,
        route: Route,
        max_frame_bytes: int,
        frame_layers: int,
        source: PoolPages,
        queue: SendQueue,
        order: int,
        executor: Executor,
        control: Callable[[bytes], None],
    ) -> None:
        super().__init__()
        self._offer, self._route, self._source, self._queue = offer, route, source, queue
        self._order, self._executor, self._control = order, executor, control
        self._max_frame_bytes, self._frame_layers = max_frame_bytes, frame_layers
        self._frames = self._announced_bytes = 0
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._start(self._run(), f"send {offer.request}")
        self.on_end(self._ended)

    def ready(self, layers: range, pages: range, event: torch.Event | None = None) -> None:
        """Pages `pages` of the request, by their place in it, are complete in `layers` once `event` has happened.

        Any thread may call it. Raises ValueError for what the transfer does not have.
        """
        for given, most in ((layers, self._offer.layout.num_layers), (pages, self._offer.num_pages)):
            if given.step != 1 or not 0 <= given.start < given.stop <= most:
                raise ValueError(f"layers {layers}, pages {pages}: {given} is no part of {range(most)}")
        self._put(Piece(layers.start, layers.stop, pages.start, pages.stop, event))

    def finish(self) -> None:
        """Everything was made ready. Any thread may call it."""
        self._put(None)

    def _put(self, piece: Piece | None) -> None:
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def _run(self) -> None:
        try:
            await self._send()
        finally:
            await in_thread(self._executor, self._source.synchronize)

    def _ended(self) -> None:
        """Tell the receiver, also where an abort came before the first step."""
        error = None if self._task.cancelled() else self._task.exception()
        if self._task.cancelled() or error is not None:
            self._control(pack(GivenUp("it was aborted" if error is None else reason_of(error))))

    async def _send(self) -> None:
        route, offer = self._route, self._offer
        payload_sender = await route.transport.sender(route.peer, route.key)
        outgoing = Outgoing(
            request_id=offer.request,
            layout=offer.layout,
            codec=route.codec,
            num_tokens=offer.num_pages * offer.layout.page_size,
            held_pages=0,
            frame_bytes=route.frame_bytes(self._max_frame_bytes),
            on_device=route.on_device,
            frame_layers=self._frame_layers,
        )
        sender = PageSender(
            outgoing, payload_sender, self._announce, self._queue, self._order, self._executor, self.counts
        )
        try:
            self._control(pack(Accepted(route.codec.name, route.transport.name, route.transport.address)))
            sending = asyncio.create_task(sender.run(self._source))
            beside = [asyncio.create_task(part) for part in (self._feed(sender), self._beat())]
            try:
                await sending
            finally:
                for task in (sending, *beside):
                    task.cancel()
                await settled(sending, *beside)
            self._control(pack(End(self._frames, self._announced_bytes)))
        finally:
            await payload_sender.aclose()

    async def _feed(self, sender: PageSender) -> None:
        while (piece := await self._pieces.get()) is not None:
            sender.add(piece)
        sender.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._control(pack(Working()))

    def _announce(self, announcement: Announcement) -> None:
        self._frames += 1
        self._announced_bytes += announcement.payload_bytes
        self._control(pack(announcement))


def whole(num_layers: int, pages: Sequence[int]) -> tuple[range, range]:
    """All pages of all layers, for `ready`."""
    return range(num_layers), range(len(pages))
