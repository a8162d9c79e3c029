"""Transfers of several stages under a test's control: what is held back, what is noted, who is lost."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

from kvrail.codec.core.digest import digest_of
from kvrail.errors import WorkerUnavailableError
from kvrail.transfer.send_queue import SendQueue
from kvrail.transfer.sending import PageSender
from kvrail.transfer.sizes import first_recent_page

PAGE = 16
SHARED = {"kv_dtype": "bfloat16", "page_size": PAGE, "max_batch_tokens": 256, "max_frame_bytes": 1 << 13}


def hold_later_stages(monkeypatch, until):
    """Later stages get no turn on the queue before `until` has returned."""
    turn = SendQueue.turn

    @asynccontextmanager
    async def waiting(queue, order, *, later=False):
        if later:
            await until()
        async with turn(queue, order, later=later):
            yield

    monkeypatch.setattr(SendQueue, "turn", waiting)


def on_send(monkeypatch, hook):
    """`await hook(sender, header, stage)` before each frame leaves; it may raise, wait, or give another stage."""
    leave = PageSender._leave

    async def hooked(sender, stage):
        header = replace(stage.header, sequence=sender._next_sequence)
        changed = await hook(sender, header, stage)
        await leave(sender, changed or stage)

    monkeypatch.setattr(PageSender, "_leave", hooked)


def with_payload(stage, payload, *, sealed=False):
    """The same stage with another payload; sealed: as if the codec had made it, else as if the wire had changed it."""
    digest = digest_of(payload) if sealed else stage.digest
    return replace(stage, payload=payload, digest=digest)


def note_frames(monkeypatch):
    """Headers of all frames, in the order in which they leave."""
    headers = []

    async def noting(sender, header, stage):
        headers.append(header)

    on_send(monkeypatch, noting)
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
    return sum(worker.meters.transfers.held_bytes.value for worker in c.prefills.values()) + kept_bytes(c)


def kept_bytes(c):
    return c.decode.meters.transfers.kept_bytes.value


class Dying:
    """Prefill workers are lost after so many later stages of pages that are not recent: the first one, or each."""

    def __init__(self, monkeypatch, after, prompt, once=True):
        self.deaths, self.sent = 0, 0
        recent = first_recent_page(len(prompt), PAGE)

        async def send_or_die(sender, header, stage):
            if header.stage and header.first_page < recent and not (once and self.deaths):
                self.sent += 1
                if self.sent > after:
                    self.deaths, self.sent = self.deaths + 1, 0
                    raise WorkerUnavailableError("the worker died")

        on_send(monkeypatch, send_or_die)
