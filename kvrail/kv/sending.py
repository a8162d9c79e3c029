"""The sending end of one transfer."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch

from kvrail.errors import reason_of
from kvrail.kv.attempt import Attempt
from kvrail.kv.messages import Accepted, End, GivenUp, Offer, pack
from kvrail.runtime.waiting import settled
from kvrail.transfer.pieces import Piece
from kvrail.transfer.pool_pages import PoolPages
from kvrail.transfer.route import Route
from kvrail.transfer.send_queue import SendQueue
from kvrail.transfer.sending import Outgoing, PageSender
from kvrail.transport.base import Announcement


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

    def ready(self, layers: range, pages: range, event: torch.Event | None = None) -> None:
        """Pages `pages` of the request, by their place in it, are complete in `layers` once `event` has happened."""
        self._pieces.put_nowait(Piece(layers.start, layers.stop, pages.start, pages.stop, event))

    def finish(self) -> None:
        """Everything was made ready."""
        self._pieces.put_nowait(None)

    async def _run(self) -> None:
        try:
            await self._send()
        except BaseException as error:
            self._control(pack(GivenUp(reason_of(error))))
            raise
        finally:
            await settled(asyncio.create_task(asyncio.to_thread(self._source.synchronize)))

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
            sender.begin(self._source, 0)
            sending = asyncio.create_task(sender.run())
            feeding = asyncio.create_task(self._feed(sender))
            try:
                await sending
            finally:
                feeding.cancel()
                sending.cancel()
                await settled(sending, feeding)
            self._control(pack(End(self._frames, self._announced_bytes)))
        finally:
            await payload_sender.aclose()

    async def _feed(self, sender: PageSender) -> None:
        while (piece := await self._pieces.get()) is not None:
            sender.add(piece)
        sender.close()

    def _announce(self, announcement: Announcement) -> None:
        self._frames += 1
        self._announced_bytes += announcement.payload_bytes
        self._control(pack(announcement))


def whole(num_layers: int, pages: Sequence[int]) -> tuple[range, range]:
    """All pages of all layers, for `ready`."""
    return range(num_layers), range(len(pages))
