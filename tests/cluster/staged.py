"""Transfers of several stages under a test's control: what is held back, what is noted, who is lost."""

import asyncio
from contextlib import asynccontextmanager

from codec.frame import unpack
from kvrail.errors import WorkerUnavailableError
from kvrail.transport.replies import PrefillReplies
from services.frames import first_recent_page
from services.prefill.link import Link

PAGE = 16
SHARED = {"kv_dtype": "bfloat16", "page_size": PAGE, "max_batch_tokens": 256, "max_frame_bytes": 1 << 13}
MAX_FRAME = 1 << 20


def hold_later_stages(monkeypatch, until):
    """Later stages get no turn on the link before `until` has returned."""
    turn = Link.turn

    @asynccontextmanager
    async def waiting(link, order, *, later=False):
        if later:
            await until()
        async with turn(link, order, later=later):
            yield

    monkeypatch.setattr(Link, "turn", waiting)


def header_of(frame):
    """Of a frame on its way out."""
    return unpack(frame.open(), MAX_FRAME)[0]


def note_frames(monkeypatch):
    """Headers of all frames, in the order in which they leave."""
    headers = []
    send = PrefillReplies.send

    async def noting(replies, frame):
        headers.append(header_of(frame))
        await send(replies, frame)

    monkeypatch.setattr(PrefillReplies, "send", noting)
    return headers


async def first_stages_left(headers, num_pages, num_layers=3):
    """Wait until first stages of so many pages of each layer are among `headers`, those of one request's frames."""
    while sum(h.spec.num_layers * h.spec.num_pages for h in headers if not h.stage) < num_pages * num_layers:
        await asyncio.sleep(0.002)


async def drafted(worker, count):
    """Wait until the decode worker has made that many drafts."""
    while drafts_now(worker) < count:
        await asyncio.sleep(0.002)


async def until_drafted(worker, count, dying):
    """Wait for drafts before the first death of a transfer."""
    while drafts_now(worker) < count and not dying.sent:
        await asyncio.sleep(0.002)


def drafts_now(worker):
    return sum(len(sequence.drafts) for sequence in worker.engine._scheduler._receiving)


def held_bytes(c):
    """Of later stages at the prefill workers, and of earlier ones at the decode worker."""
    return sum(worker.transfers.held_bytes._value.get() for worker in c.prefills.values()) + kept_bytes(c)


def kept_bytes(c):
    return c.decode.transfers.kept_bytes._value.get()


class Dying:
    """Prefill workers are lost after so many later stages of pages that are not recent: the first one, or each."""

    def __init__(self, monkeypatch, after, prompt, once=True):
        self.deaths, self.sent = 0, 0
        recent = first_recent_page(len(prompt), PAGE)
        send = PrefillReplies.send
        dying = self

        async def send_or_die(replies, frame):
            header = header_of(frame)
            if header.stage and header.first_page < recent and not (once and dying.deaths):
                dying.sent += 1
                if dying.sent > after:
                    dying.deaths, dying.sent = dying.deaths + 1, 0
                    replies.close(WorkerUnavailableError("the worker died"))
            await send(replies, frame)

        monkeypatch.setattr(PrefillReplies, "send", send_or_die)
