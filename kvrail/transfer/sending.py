"""One request's pages on their way out: encoded behind the computation, announced, carried, stage by stage.

The caller says which pages are complete in which layers. This side encodes them where they lie, in a helper thread, and
only when the send queue gives a turn. So the pages themselves are the buffer. Layers that have piled up meanwhile leave
in one frame.

Encoding makes all stages of a block at once. The first leaves at once, and so do the others of recent pages; the later
stages of other pages wait in memory, as much as the queue holds, and follow without being asked for: the prompt's last
pages first, since drafts that are made meanwhile look at these most.
"""

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from kvrail.codec.base import Codec
from kvrail.codec.core.digest import Digest, digest_of
from kvrail.codec.frame import FrameHeader, pack_head
from kvrail.runtime.waiting import in_thread, together
from kvrail.transfer.observer import SendingObserver
from kvrail.transfer.pieces import Piece, cut
from kvrail.transfer.pool_pages import PoolPages
from kvrail.transfer.send_queue import LATER_SLOTS, SendQueue
from kvrail.transfer.sizes import first_recent_page, pages_per_frame
from kvrail.transport.base import Announcement, Payload, PayloadSender
from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What one transfer sends: all pages of a prompt but the first `held_pages`, which the receiver has.

    num_tokens: of the prompt. frame_bytes: of KV that are encoded at once. on_device: payloads stay on the pages'
    device. frame_layers: most layers of a frame; 0: as many as fit.
    """

    request_id: str
    layout: KVLayout
    codec: Codec
    num_tokens: int
    held_pages: int
    frame_bytes: int
    on_device: bool = False
    frame_layers: int = 0


@dataclass(frozen=True, slots=True)
class _StagePayload:
    """One stage of one block, encoded. Header's number and, in host memory, digest are made when it leaves."""

    header: FrameHeader
    payload: Payload
    digest: Digest | None


class PageSender:
    """Sends what `outgoing` says by `sender`, telling `announce` of each frame as it leaves.

    queue, order: whose turn it is among the transfers to one machine; lower goes first. executor: its threads encode.
    Belongs to one event loop.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        payload_sender: PayloadSender,
        announce: Callable[[Announcement], None],
        queue: SendQueue,
        order: int,
        executor: Executor,
        observer: SendingObserver,
    ) -> None:
        layout, codec = outgoing.layout, outgoing.codec
        self.outgoing = outgoing
        self._payload_sender = payload_sender
        self._announce = announce
        self._queue = queue
        self._order = order
        self._executor = executor
        self._observer = observer
        self._codec = codec
        self._full_pages = outgoing.num_tokens // layout.page_size
        several = codec.num_stages > 1
        self._recent_page = first_recent_page(outgoing.num_tokens, layout.page_size) if several else 0
        self._frame_pages = pages_per_frame(layout, outgoing.frame_bytes)
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._later: list[tuple[int, int, int, _StagePayload]] = []  # a heap
        self._held: asyncio.Queue[bool] = asyncio.Queue()  # True for each that was put there, False at the end
        self._source: PoolPages
        self._asking = asyncio.Semaphore(2 * queue.slots)  # as many wait as may end at once, or later stages slip in
        self._leaving = asyncio.Semaphore(LATER_SLOTS)
        self._encoding = asyncio.Lock()  # side by side, each would take as long as all: the first could leave no sooner
        self._digesting = asyncio.Lock()  # one by one, in the order of leaving, while the next block is encoded
        self._next_sequence = 0

    def add(self, piece: Piece) -> None:
        """Queue complete pages; also before `run`."""
        if piece.end_page > self.outgoing.held_pages:
            self._pieces.put_nowait(piece)

    def close(self) -> None:
        """No more pages will come."""
        self._pieces.put_nowait(None)

    async def run(self, source: PoolPages, cached_pages: int = 0) -> None:
        """Send all pages of `source` until closed; the first `cached_pages` are complete now.

        Cancelled, it drops what still waits; no page is read any more then. Raises TransferAbortedError where the
        receiver is gone, CodecError where the codec does not take the pages.
        """
        self._source = source
        self.add(Piece(0, self.outgoing.layout.num_layers, 0, cached_pages, None))
        try:
            async with together() as sending:
                sending.create_task(self._send_pieces())
                sending.create_task(self._send_later())
        finally:
            while self._later:
                self._release(self._later.pop()[-1])

    async def _send_pieces(self) -> None:
        """Send every piece, several at a time: while the queue's slots are taken, as many ask for the next turns."""
        held_pages, frame_layers = self.outgoing.held_pages, self.outgoing.frame_layers
        taken: list[Piece | None] = []
        async with together() as sending:
            while None not in taken:
                await self._asking.acquire()  # what comes meanwhile is joined
                self._asking.release()
                taken = [await self._pieces.get()]
                while not self._pieces.empty():
                    taken.append(self._pieces.get_nowait())
                pieces = [piece for piece in taken if piece is not None]
                for piece in cut(pieces, held_pages, self._frame_pages, self._recent_page, frame_layers):
                    await self._asking.acquire()
                    sending.create_task(self._send_piece(piece))
        self._held.put_nowait(False)

    async def _send_piece(self, piece: Piece) -> None:
        """Encode and send the first stage of a piece, or all stages of recent pages."""
        try:
            async with self._queue.turn(self._order), together() as sending:
                async with self._encoding:
                    stages = await in_thread(self._executor, self._encode, piece)
                    now = len(stages) if piece.first_page >= self._recent_page else 1
                    for stage in stages[:now]:
                        sending.create_task(self._send(stage))
                    await asyncio.sleep(0)  # they are next to leave: another transfer with a turn may encode now
                for stage in stages[now:]:
                    self._hold(stage)
        finally:
            self._asking.release()

    async def _send_later(self) -> None:
        """Send the later stages that were held back: of each stage the last pages first, layer by layer."""
        async with together() as sending:
            while await self._held.get():
                await self._leaving.acquire()
                sending.create_task(self._send_held())

    async def _send_held(self) -> None:
        """Send what is first of the later stages once the queue gives a turn."""
        try:
            async with self._queue.turn(self._order, later=True):
                async with self._encoding:
                    pass  # first stages that had their turns before this one are next to leave
                *_, stage = heapq.heappop(self._later)
                with ExitStack() as held:
                    held.callback(self._release, stage)
                    await self._send(stage)
        finally:
            self._leaving.release()

    def _hold(self, stage: _StagePayload) -> None:
        self._queue.hold(stage.payload.nbytes)
        self._observer.held(stage.payload.nbytes)
        header = stage.header
        heapq.heappush(self._later, (header.stage, -header.first_page, header.first_layer, stage))
        self._held.put_nowait(True)

    def _release(self, stage: _StagePayload) -> None:
        self._queue.release(stage.payload.nbytes)
        self._observer.held(-stage.payload.nbytes)

    async def _send(self, stage: _StagePayload) -> None:
        """Send one stage; stages are announced in the order of the calls."""
        async with self._digesting:
            if stage.digest is None:
                stage = replace(stage, digest=await in_thread(self._executor, digest_of, stage.payload))
        await self._leave(stage)

    async def _leave(self, stage: _StagePayload) -> None:
        """Announce and carry one stage. Nothing waits between the two: numbers, announcements and payloads agree."""
        begin = perf_counter()
        header = replace(stage.header, sequence=self._next_sequence)
        self._next_sequence += 1
        size = stage.payload.nbytes
        assert stage.digest is not None
        head = pack_head(header, stage.digest)
        self._announce(Announcement(head, size, isinstance(stage.payload, torch.Tensor)))
        await self._payload_sender.send(stage.payload)
        self._observer.sent(header, size, perf_counter() - begin)

    def _encode(self, piece: Piece) -> list[_StagePayload]:
        """All stages of one piece, complete, with the digests of those that lie on a device."""
        codec, source, outgoing = self._codec, self._source, self.outgoing
        layers = range(piece.first_layer, piece.end_layer)
        begin = perf_counter()
        with source.reading(piece.ready):
            if piece.end_page > self._full_pages:
                source.fill_tail(layers)
            pages = source.block(layers, piece.first_page, piece.end_page)
            encoding = codec.encode(pages, on_device=outgoing.on_device)
            payloads = encoding.stages()
            digests = [digest_of(payload) if isinstance(payload, torch.Tensor) else None for payload in payloads]
        seconds = perf_counter() - begin
        header = FrameHeader(
            request_id=outgoing.request_id,
            codec=codec.name,
            stage=0,
            num_stages=codec.num_stages,
            spec=pages.spec,
            first_layer=piece.first_layer,
            first_page=piece.first_page,
            sequence=0,
            parameters_id=codec.parameters_id,
        )
        self._observer.encoded(header, seconds, encoding.stats())
        return [
            _StagePayload(replace(header, stage=stage), payload, digest)
            for stage, (payload, digest) in enumerate(zip(payloads, digests, strict=True))
        ]
