"""One request's pages on their way out: encoded behind the computation, framed, sent stage by stage.

The engine's thread says which pages a layer has completed; this side encodes them where they lie, on the side stream,
in a helper thread, only when the link gives a turn. So the pages themselves are the buffer. Layers that have piled up
meanwhile leave in one frame.

Encoding makes all stages of a block at once. The first leaves at once, and so do the others of recent pages; the later
stages of other pages wait in memory, as much as the link holds, and follow without being asked for: the prompt's last
pages first, since drafts that are made meanwhile look at these most.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from codec.base import BlockSpec, Codec
from codec.frame import FrameHeader, head_of
from kvrail.engine.events import PageLease
from kvrail.transport.frames import FrameSender
from kvrail.wire.replies import SealedFrame, seal
from kvrail.worker import Worker
from services.frames import first_recent_page, pages_per_frame
from services.pages import fill_tail, paged_block
from services.prefill.link import LATER_SLOTS, SLOTS, Link
from services.prefill.pieces import Piece, cut

A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _StagePayload:
    """One stage of one block, encoded."""

    piece: Piece
    spec: BlockSpec
    stage: int
    payload: memoryview


class Shipment:
    """Sends the pages of one request, from logical page `held_pages` on; the receiver has those before.

    order: the request's place among those that share `link`, lower first. num_tokens: of the prompt. frame_bytes: of KV
    that are encoded at once.
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
        frame_bytes: int,
    ) -> None:
        self._worker = worker
        self._link = link
        self._order = order
        self._executor = executor
        self._codec = codec
        self._request_id = request_id
        self._full_pages, self._last_used = divmod(num_tokens, worker.loaded.layout.page_size)
        self._held_pages = held_pages
        self._recent_page = first_recent_page(num_tokens, worker.loaded.layout.page_size) if codec.num_stages > 1 else 0
        self._frame_pages = pages_per_frame(worker.loaded.layout, frame_bytes)
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._later: list[tuple[int, int, int, _StagePayload]] = []  # a heap
        self._held: asyncio.Queue[bool] = asyncio.Queue()  # True for each that was put there, False at the end
        self._lease: PageLease | None = None
        self._begun = asyncio.Event()
        self._asking = asyncio.Semaphore(SLOTS + 1)
        self._leaving = asyncio.Semaphore(LATER_SLOTS)
        self._encoding = asyncio.Lock()  # side by side, each would take as long as all: the first could leave no sooner
        self._sending = asyncio.Lock()
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
        """Send everything until closed. Cancelled, it drops what still waits."""
        await self._begun.wait()  # pages may be complete before this side hears that they were given out
        begin = perf_counter()
        stages = [asyncio.create_task(part) for part in (self._send_pieces(sender), self._send_later(sender))]
        try:
            await asyncio.gather(*stages)
        finally:
            for task in stages:
                task.cancel()
            await asyncio.gather(*stages, return_exceptions=True)
            while self._later:
                self._release(self._later.pop()[-1])
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

    async def _send_pieces(self, sender: FrameSender) -> None:
        """Send every piece, several at a time: while the link's slots are taken, another asks for the next turn."""
        closed = False
        async with _together() as sending:
            while not closed:
                await self._asking.acquire()  # what comes meanwhile is joined
                self._asking.release()
                pieces, closed = await self._next_pieces()
                for piece in cut(pieces, self._held_pages, self._frame_pages, self._recent_page):
                    await self._asking.acquire()
                    sending.create_task(self._send_piece(sender, piece))
        self._held.put_nowait(False)

    async def _send_piece(self, sender: FrameSender, piece: Piece) -> None:
        """Encode and send the first stage of a piece, or all stages of recent pages."""
        try:
            async with self._link.turn(self._order):
                async with self._encoding:
                    stages = await self._in_thread(self._encode, piece)
                now = len(stages) if piece.first_page >= self._recent_page else 1
                for stage in stages[:now]:
                    await self._send(sender, stage)
                for stage in stages[now:]:
                    self._hold(stage)
                await sender.drained()
        finally:
            self._asking.release()

    async def _send_later(self, sender: FrameSender) -> None:
        """Send the later stages that were held back: of each stage the last pages first, layer by layer."""
        async with _together() as sending:
            while await self._held.get():
                await self._leaving.acquire()
                sending.create_task(self._send_held(sender))

    async def _send_held(self, sender: FrameSender) -> None:
        """Send what is first of the later stages once the link gives a turn."""
        try:
            async with self._link.turn(self._order, later=True):
                *_, stage = heapq.heappop(self._later)
                try:
                    await self._send(sender, stage)
                    await sender.drained()
                finally:
                    self._release(stage)
        finally:
            self._leaving.release()

    def _hold(self, stage: _StagePayload) -> None:
        self._link.hold(stage.payload.nbytes)
        self._worker.transfers.held_bytes.inc(stage.payload.nbytes)
        heapq.heappush(self._later, (stage.stage, -stage.piece.first_page, stage.piece.first_layer, stage))
        self._held.put_nowait(True)

    def _release(self, stage: _StagePayload) -> None:
        self._link.release(stage.payload.nbytes)
        self._worker.transfers.held_bytes.dec(stage.payload.nbytes)

    async def _send(self, sender: FrameSender, stage: _StagePayload) -> None:
        """Frame and queue one stage; one at a time, since frames are numbered in the order in which they leave."""
        async with self._sending:
            frame = await self._in_thread(self._frame, stage)
            self._sequence += 1
            await sender.send(frame)
        raw_bytes = stage.spec.raw_bytes if stage.stage == 0 else 0
        self._worker.transfers.sent(self._codec.name, raw_bytes=raw_bytes, payload_bytes=stage.payload.nbytes)

    async def _in_thread(self, function: Callable[[A], T], argument: A) -> T:
        """Run in a helper thread; a cancelled caller still waits: pages must not be given back while they are read."""
        work = asyncio.get_running_loop().run_in_executor(self._executor, function, argument)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def _encode(self, piece: Piece) -> list[_StagePayload]:
        """All stages of one piece."""
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
        return [_StagePayload(piece, pages.spec, stage, payload) for stage, payload in enumerate(payloads)]

    def _frame(self, stage: _StagePayload) -> SealedFrame:
        header = FrameHeader(
            request_id=self._request_id,
            codec=self._codec.name,
            stage=stage.stage,
            num_stages=self._codec.num_stages,
            spec=stage.spec,
            first_layer=stage.piece.first_layer,
            first_page=stage.piece.first_page,
            sequence=self._sequence,
        )
        return sealed(header, stage.payload)


@asynccontextmanager
async def _together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first of its tasks' errors as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def sealed(header: FrameHeader, payload: memoryview) -> SealedFrame:
    """The frame of a payload, ready to leave: the one copy that the sender makes."""
    return seal(head_of(header, payload), payload)
