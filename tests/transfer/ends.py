"""Both ends of a transfer between two pieces of memory: no engine, no metrics, no call."""

import asyncio
import contextlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import torch

from kvrail.codec import registry
from kvrail.codec.base import Block, PagedBlock
from kvrail.transfer.guard import Transfer
from kvrail.transfer.pieces import Piece
from kvrail.transfer.receiving import PageReceiver
from kvrail.transfer.send_queue import SendQueue
from kvrail.transfer.sending import Outgoing, PageSender
from kvrail.transfer.sizes import block_spec, first_recent_page
from kvrail.transport.base import Peer
from kvrail.values.layout import KVLayout
from tests.inproc.transport import InprocTransport

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, key_dim=8, value_dim=6, page_size=16, dtype="bfloat16")
TOKENS = 10 * 16 + 5
PAGES = LAYOUT.pages_for(TOKENS)
NEVER = Peer(b"")
keys = itertools.count(1)


class Memory:
    """Pages of one request in a pool of their own, in an order of their own; poisoned where nothing was written."""

    def __init__(self, seed=None):
        rows = (LAYOUT.num_layers, 2 * PAGES, LAYOUT.page_size, LAYOUT.num_kv_heads)
        pools = [torch.full((*rows, dim), float("nan"), dtype=torch.bfloat16) for dim in (8, 6)]
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            pools = [torch.randn(pool.shape, generator=generator).to(torch.bfloat16) for pool in pools]
        self.pools = Block(*pools)
        self.order = random.Random(seed).sample(range(2 * PAGES), PAGES)
        self.writes = 0

    def block(self, layers, first_page, end_page):
        return PagedBlock(self.pools, layers, self.order[first_page:end_page])

    def reading(self, ready):
        return contextlib.nullcontext()

    def writing(self):
        self.writes += 1
        return contextlib.nullcontext()

    def fill_tail(self, layers):
        for pool in self.pools.tensors():
            slots = pool[layers.start : layers.stop, self.order[TOKENS // 16]]
            slots[:, TOKENS % 16 :] = slots[:, TOKENS % 16 - 1 : TOKENS % 16]

    def synchronize(self):
        pass

    def whole(self):
        return [t.view(torch.int16) for t in self.block(range(4), 0, PAGES).gather().tensors()]


class Observer:
    """Adds up what it is told."""

    def __init__(self):
        self.raw_sent = self.raw_landed = self.held_bytes = self.kept_bytes = self.frames = self.coarse_times = 0

    def encoded(self, codec, seconds, stats):
        assert seconds > 0 and stats.values

    def sent(self, header, payload_bytes, seconds):
        self.raw_sent += header.spec.raw_bytes * (header.stage == 0)

    def held(self, change):
        self.held_bytes += change

    def arrived(self, payload_bytes, waited_s, crossing_s):
        self.frames += 1

    def decoded(self, header, payload_bytes, seconds):
        self.raw_landed += header.spec.raw_bytes * (header.stage == header.num_stages - 1)

    def coarse(self):
        self.coarse_times += 1

    def kept(self, change):
        self.kept_bytes += change


class Transfers:
    """Both ends of one transfer, joined by a transport and a queue."""

    def __init__(self, codec, held_pages=0, silence_s=240.0, frame_bytes=4096, cached_pages=3):
        self.cached_pages = cached_pages
        self.codec = registry.get(codec)
        self.source, self.sink, self.observer = Memory(1), Memory(), Observer()
        self.announced = asyncio.Queue()
        self.transport, self.key = InprocTransport(), next(keys)
        self.held_pages = held_pages
        self.executor = ThreadPoolExecutor(2)
        self.silence_s = silence_s
        self.outgoing = Outgoing("r", LAYOUT, self.codec, TOKENS, held_pages, frame_bytes)

    async def send(self):
        payload_sender = await self.transport.sender(NEVER, self.key)
        sender = PageSender(
            self.outgoing,
            payload_sender,
            self.announced.put_nowait,
            SendQueue(1 << 20),
            1,
            self.executor,
            self.observer,
        )
        try:
            sending = asyncio.create_task(sender.run(self.source, self.cached_pages))
            borders = [border for border in (3, 7, PAGES) if border >= self.cached_pages]
            for layer, (first, end) in itertools.product(range(4), itertools.pairwise(borders)):
                sender.add(Piece(layer, layer + 1, first, end, None))
                await asyncio.sleep(0)
            sender.close()
            await sending
            self.announced.put_nowait(None)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await payload_sender.aclose()

    def receiver(self):
        recent = first_recent_page(TOKENS, LAYOUT.page_size)
        spec = block_spec(LAYOUT, PAGES - self.held_pages)
        transfer = Transfer(
            "r", self.codec.name, self.codec.num_stages, spec, self.held_pages, recent, self.codec.parameters_id
        )
        return PageReceiver(transfer, self.codec, self.sink, self.executor, self.observer, self.silence_s)

    async def receive(self):
        while self.key not in self.transport._attempts:
            await asyncio.sleep(0)
        payload_receiver = await self.transport.receiver(NEVER, self.key)
        try:
            await self.receiver().run(self.announced.get, payload_receiver)
        finally:
            await payload_receiver.aclose()

    async def run(self):
        async with asyncio.timeout(250):
            sending = asyncio.create_task(self.send())
            try:
                await self.receive()
                await sending
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
