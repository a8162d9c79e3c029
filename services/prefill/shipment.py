"""One request's pages on their way out: encoded behind the computation, framed, sent in order.

The engine's thread says which pages a layer has completed; this side encodes them where they lie, on the side stream,
in a helper thread, only when the transport takes another frame. So the pages themselves are the buffer, and a slow
receiver costs no memory. Layers that have piled up meanwhile leave in one frame.
"""

import asyncio
from concurrent.futures import Executor
from time import perf_counter

from codec.base import Codec
from codec.frame import FrameHeader, pack
from kvrail.engine.events import PageLease
from kvrail.transport.base import FrameSender
from kvrail.worker import Worker
from services.frames import pages_per_frame
from services.pages import fill_tail, paged_block
from services.prefill.link import Link
from services.prefill.pieces import Piece, cut


class Shipment:
    """Sends the pages of one request, from logical page `held_pages` on; the receiver has those before.

    order: the request's place among those that share `link`, lower first. num_tokens: of the prompt.
    """

    def __init__(
        self,
        worker: Worker,
        executor: Executor,
        link: Link,
        order: int,
        codec: Codec,
        request_id: str,
        num_tokens: int,
        held_pages: int,
    ) -> None:
        self._worker = worker
        self._link = link
        self._order = order
        self._executor = executor
        self._codec = codec
        self._request_id = request_id
        self._full_pages, self._last_used = divmod(num_tokens, worker.loaded.layout.page_size)
        self._held_pages = held_pages
        self._frame_pages = pages_per_frame(worker.loaded.layout, worker.settings.max_frame_bytes)
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._lease: PageLease | None = None
        self._begun = asyncio.Event()
        self._sequence = 0

    def begin(self, cached_tokens: int) -> None:
        """The request has its pages; those of a cached prefix can leave at once."""
        self._lease = self._worker.engine.claim_lease(self._request_id)
        if self._lease is None:
            return  # dropped meanwhile: the engine's events end the story
        self._begun.set()
        layout = self._worker.loaded.layout
        cached_pages = cached_tokens // layout.page_size
        self.add(Piece(0, layout.num_layers, 0, cached_pages, self._worker.side.mark()))

    def add(self, piece: Piece) -> None:
        """Queue complete pages."""
        if piece.end_page > self._held_pages:
            self._pieces.put_nowait(piece)

    def close(self) -> None:
        """No more pages will come."""
        self._pieces.put_nowait(None)

    async def run(self, sender: FrameSender) -> None:
        """Send everything until closed."""
        await self._begun.wait()  # pages may be complete before this side hears that they were given out
        begin = perf_counter()
        closed = False
        while not closed:
            pieces, closed = await self._next_pieces()
            for piece in cut(pieces, self._held_pages, self._frame_pages):
                async with self._link.turn(self._order):
                    for frame in await self._encode(piece):
                        await sender.send(frame)
        self._worker.transfers.seconds["sent"].observe(perf_counter() - begin)

    async def release(self) -> None:
        """Give the pages back; nothing of this shipment may run any more."""
        if self._lease is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(self._executor, self._worker.side.synchronize)
            finally:
                self._worker.engine.release_lease(self._lease)

    async def _next_pieces(self) -> tuple[list[Piece], bool]:
        """All pieces that wait, at least one; and whether that was the end."""
        taken = [await self._pieces.get()]
        while not self._pieces.empty():
            taken.append(self._pieces.get_nowait())
        return [piece for piece in taken if piece is not None], taken[-1] is None

    async def _encode(self, piece: Piece) -> list[bytes]:
        """Frames of one piece, one a stage."""
        work = asyncio.get_running_loop().run_in_executor(self._executor, self._encode_now, piece)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])  # the pages must not be given back while they are read
            raise

    def _encode_now(self, piece: Piece) -> list[bytes]:
        worker, codec = self._worker, self._codec
        assert self._lease is not None
        page_ids = self._lease.pages[piece.first_page : piece.end_page]
        layers = range(piece.first_layer, piece.end_layer)
        pages = paged_block(worker.cache, layers, page_ids)
        begin = perf_counter()
        with worker.side.after(piece.ready):
            if piece.end_page > self._full_pages:
                fill_tail(worker.cache, layers, page_ids[-1], self._last_used)
            encoding = codec.encode(pages)
        payloads = encoding.stages()
        stats = encoding.stats()
        worker.coding.encoded(
            codec.name,
            perf_counter() - begin,
            values=stats.values,
            escapes=stats.escapes,
            raw_tensors=stats.raw_tensors,
        )
        frames = []
        for stage, payload in enumerate(payloads):
            header = FrameHeader(
                request_id=self._request_id,
                codec=codec.name,
                stage=stage,
                num_stages=codec.num_stages,
                spec=pages.spec,
                first_layer=piece.first_layer,
                first_page=piece.first_page,
                sequence=self._sequence,
            )
            self._sequence += 1
            frames.append(pack(header, payload))
            raw_bytes = pages.spec.raw_bytes if stage == 0 else 0
            worker.transfers.sent(codec.name, raw_bytes=raw_bytes, payload_bytes=payload.nbytes)
        return frames
