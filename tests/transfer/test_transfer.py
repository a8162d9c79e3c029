"""Whole transfers between two pieces of memory: no engine, no metrics, no call."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kvrail.codec.base import CodecError
from kvrail.codec.core.digest import digest_of
from kvrail.codec.frame import pack_head, unpack_head
from kvrail.errors import FrameError, OverloadedError, TransferAbortedError, WorkerUnavailableError
from kvrail.transfer import sending
from kvrail.transfer.receiving import AT_ONCE
from kvrail.transfer.sending import Outgoing
from kvrail.transfer.sizes import block_spec, first_recent_page
from tests.inproc.transport import InprocTransport
from tests.transfer.ends import LAYOUT, PAGES, TOKENS, Transfers

CODECS = ("raw", "splitzip-channel", "splitzip-progressive-ans", "lynx-exact")


@pytest.mark.parametrize("held_pages", [0, 2, 5])
@pytest.mark.parametrize("name", CODECS)
async def test_every_page_arrives_bit_for_bit(name, held_pages):
    both = Transfers(name, held_pages)
    await both.run()
    landed = both.sink.block(range(4), held_pages, PAGES).gather().tensors()
    for sent, came in zip(both.source.block(range(4), held_pages, PAGES).gather().tensors(), landed, strict=True):
        assert torch.equal(sent.view(torch.int16), came.view(torch.int16))
    missing = block_spec(LAYOUT, PAGES - held_pages).raw_bytes
    observer = both.observer
    assert observer.raw_sent == observer.raw_landed == missing
    assert not observer.held_bytes and not observer.kept_bytes
    assert (observer.coarse_times > 0) == (both.codec.num_stages > 1)
    untouched = both.sink.block(range(4), 0, held_pages).gather().keys if held_pages else torch.full((1,), float("nan"))
    assert untouched.float().isnan().all()


class Losing(InprocTransport):
    """A receiver that fails at its n-th payload."""

    def __init__(self, after, error):
        super().__init__()
        self.after, self.error = after, error

    async def receiver(self, peer, key):
        payload_receiver = await super().receiver(peer, key)
        receive, count = payload_receiver.receive, 0

        async def failing(size, *, on_device):
            nonlocal count
            count += 1
            if count > self.after:
                if self.error is None:
                    await asyncio.sleep(3600)
                raise self.error
            return await receive(size, on_device=on_device)

        payload_receiver.receive = failing
        return payload_receiver


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("name", ["raw", "splitzip-progressive-ans"])
async def test_what_the_transport_raises_ends_it_and_nothing_is_kept(name, after):
    both = Transfers(name)
    both.transport = Losing(after, TransferAbortedError("the sender is gone"))
    with pytest.raises(TransferAbortedError, match="gone"):
        await both.run()
    assert not both.observer.held_bytes and not both.observer.kept_bytes
    assert not any(
        task.get_name().startswith("Task") and not task.done()
        for task in asyncio.all_tasks() - {asyncio.current_task()}
    )


class Full(InprocTransport):
    """Has no memory to receive into, which the sender learns before the receiver's wait has ended."""

    async def receiver(self, peer, key):
        payload_receiver = await super().receiver(peer, key)

        async def failing(size, *, on_device):
            await asyncio.sleep(0.1)
            raise OverloadedError("no memory was free")

        payload_receiver.receive = failing
        return payload_receiver


async def test_a_failure_of_this_end_is_told_though_the_sender_gives_up_for_it_first():
    both = Transfers("raw")
    both.transport, get, count = Full(), both.announced.get, 0

    async def announced():
        nonlocal count
        count += 1
        if count > 1:
            raise TransferAbortedError("the sender gave up: the receiver is gone")
        return await get()

    both.announced.get = announced
    with pytest.raises(OverloadedError, match="no memory"):
        await both.run()


class Watched:
    """A codec; how many of its decodings run at once, what each does first, and how many have ended."""

    def __init__(self, codec, first=lambda number: None):
        self._codec, self._first = codec, first
        self.running = self.most = self.ended = self._begun = 0

    def __getattr__(self, name):
        return getattr(self._codec, name)

    def decode(self, stage, payloads, out):
        self.running += 1
        self.most = max(self.most, self.running)
        self._begun += 1
        try:
            self._first(self._begun)
            self._codec.decode(stage, payloads, out)
        finally:
            self.running -= 1
            self.ended += 1


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", CODECS)
async def test_frames_of_one_stage_through_host_memory_are_decoded_side_by_side(name, on_device):
    both = Transfers(name, cached_pages=PAGES)
    both.executor = ThreadPoolExecutor(8)
    wanted = AT_ONCE if both.codec.num_stages == 1 and not on_device else 1
    met = threading.Event()

    def meet(number):
        if watched.running >= wanted:
            met.set()
        met.wait(20)
        time.sleep(0.002)

    watched = both.codec = Watched(both.codec, meet)
    if on_device:
        both.transport = AsOnDevice()
        announce = both.announced.put_nowait
        both.announced.put_nowait = lambda each: announce(each and replace(each, on_device=True))
    await both.run()
    assert watched.most == wanted
    assert all(map(torch.equal, both.source.whole(), both.sink.whole()))
    assert both.observer.raw_landed == block_spec(LAYOUT, PAGES).raw_bytes


async def test_where_one_frame_is_wrong_no_other_is_written_any_more():
    both = Transfers("raw", cached_pages=PAGES)
    both.executor = ThreadPoolExecutor(8)

    def fail(number):
        if number == 2:
            raise CodecError("this one is wrong")
        time.sleep(0.1)

    watched = both.codec = Watched(both.codec, fail)
    with pytest.raises(FrameError, match="this one is wrong"):
        await both.run()
    assert watched.running == 0
    ended, writes = watched.ended, both.sink.writes
    await asyncio.sleep(0.2)
    assert (watched.ended, both.sink.writes) == (ended, writes)
    assert ended <= AT_ONCE + 1


class AsOnDevice(InprocTransport):
    """Takes host memory where memory of a device was announced."""

    async def receiver(self, peer, key):
        payload_receiver = await super().receiver(peer, key)
        receive = payload_receiver.receive
        payload_receiver.receive = lambda size, *, on_device: receive(size, on_device=False)
        return payload_receiver


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ["raw", "splitzip-progressive-ans"])
async def test_a_payload_of_another_digest_reaches_no_page(name, on_device):
    """Wherever it lies: on a device it is checked by the thread that decodes it."""
    both = Transfers(name, cached_pages=PAGES, frame_bytes=1 << 20)
    both.transport = AsOnDevice()
    announce = both.announced.put_nowait

    def wrong(announcement):
        if announcement is not None:
            header, digest = unpack_head(announcement.head, announcement.payload_bytes, 1 << 20)
            head = pack_head(header, replace(digest, value=digest.value ^ 1))
            announcement = replace(announcement, head=head, on_device=on_device)
        announce(announcement)

    both.announced.put_nowait = wrong
    with pytest.raises(FrameError, match="digest"):
        await both.run()
    assert all(tensor.isnan().all() for tensor in both.sink.block(range(4), 0, PAGES).gather().tensors())


async def test_a_payload_that_never_comes_is_a_silence():
    both = Transfers("raw", silence_s=0.2)
    both.transport = Losing(2, None)
    with pytest.raises(WorkerUnavailableError, match=r"silent for 0\.2 s"):
        await both.run()


async def test_announcements_that_stop_are_a_silence():
    both = Transfers("raw", silence_s=0.2)
    both.announced.put_nowait = lambda announcement: None
    with pytest.raises(WorkerUnavailableError, match=r"silent for 0\.2 s"):
        await both.run()


async def test_an_end_that_comes_too_early_is_told():
    both = Transfers("raw")
    put, count = both.announced.put_nowait, 0

    def ending(announcement):
        nonlocal count
        count += 1
        put(announcement if count < 3 else None)

    both.announced.put_nowait = ending
    with pytest.raises(FrameError, match="heads of pages missing"):
        await both.run()


async def test_a_head_of_another_request_takes_no_memory():
    both = Transfers("raw")
    both.outgoing = Outgoing("another", LAYOUT, both.codec, TOKENS, 0, 4096)
    with pytest.raises(FrameError, match="another"):
        await both.run()
    assert not both.observer.frames and not both.sink.writes


@pytest.mark.parametrize("name", ["raw", "splitzip-progressive-ans"])
async def test_cancelled_at_any_moment_it_leaves_nothing(name):
    for moment in range(1, 60, 3):
        both = Transfers(name)
        task = asyncio.create_task(both.run())
        for _ in range(moment):
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not both.observer.held_bytes and not both.observer.kept_bytes
        writes = both.sink.writes
        await asyncio.sleep(0.002)
        assert both.sink.writes == writes


async def test_a_later_stage_waits_for_first_stages_whose_turn_came_before(monkeypatch):
    """Encoding is slow here and the link idle: as soon as a first stage has left, its later ones could."""
    both = Transfers("splitzip-progressive-ans", frame_bytes=1 << 20, cached_pages=PAGES)
    encode = type(both.codec).encode

    def slow(*args, **named):
        time.sleep(0.05)
        return encode(*args, **named)

    monkeypatch.setattr(type(both.codec), "encode", slow)
    heads, take = [], both.announced.put_nowait
    both.announced.put_nowait = lambda item: (heads.append(item), take(item))
    await both.run()
    headers = [unpack_head(each.head, each.payload_bytes, 1 << 20)[0] for each in heads[:-1]]
    recent = first_recent_page(TOKENS, LAYOUT.page_size)
    assert [(header.first_page, header.stage) for header in headers] == [(0, 0), (recent, 0), (recent, 1), (0, 1)]


async def test_a_blocks_stages_leave_in_order_however_long_the_digest_of_one_takes(monkeypatch):
    both = Transfers("lynx-exact", frame_bytes=1 << 20, cached_pages=PAGES)
    taken = []

    def slow_for_the_second_stage(payload):
        taken.append(payload)
        if len(taken) == 1 + both.codec.num_stages + 1:  # the first stage of the block, all of recent pages, then this
            time.sleep(0.05)
        return digest_of(payload)

    monkeypatch.setattr(sending, "digest_of", slow_for_the_second_stage)
    await both.run()
    assert len(taken) == 2 * both.codec.num_stages
