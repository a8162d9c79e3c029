"""What holds for every transport."""

import asyncio
import random

import pytest

from kvrail.errors import (
    DeadlineError,
    FrameError,
    IncompatibleError,
    KvrailError,
    OverloadedError,
    RequestCancelledError,
    TransferAbortedError,
    WorkerUnavailableError,
)
from kvrail.transport.frames import Expectation, Summary
from kvrail.wire.replies import SealedFrame, seal
from kvrail.wire.v1.common_pb2 import Mark
from kvrail.wire.v1.prefill_pb2 import Accepted, FirstToken, PrefillRequest

REQUEST = PrefillRequest(request_id="r", prompt_token_ids=[1, 2, 3])
ROOM = Expectation("r", max_frame_bytes=1 << 20, max_total_bytes=1 << 30)
PATIENCE_S = 20


def begin(client, expectation=ROOM, **options):
    call = client.prefill(REQUEST, **options)
    if expectation is not None:
        call.reserve(expectation)
    return call


async def receive_all(call):
    frames = []
    while (frame := await call.receive()) is not None:
        frames.append(bytes(frame))
    return frames


@pytest.fixture(autouse=True)
async def nothing_pending():
    """A test leaves no task of ours behind."""
    yield
    async with asyncio.timeout(PATIENCE_S):
        while left := [task for task in asyncio.all_tasks() if task.get_name().startswith("prefill ")]:
            await asyncio.wait(left)


async def test_a_whole_call(transport):
    generator = random.Random(0)
    sizes = [1, 2, 100, 4095, 4096, 4097, 100_000, 3, 0, 70_000]
    sent = [generator.randbytes(size) for size in sizes]
    marks = [Mark(stage="prefill_started", seconds=0.5)]
    seen = []

    async def story(request, replies):
        seen.append(request)
        replies.accept(Accepted(codec="raw", first_page=3, page_count=4))
        for frame in sent[:5]:
            await replies.send(seal(frame))
        replies.first_token(FirstToken(token_ids=[7]))
        for frame in sent[5:]:
            await replies.send(seal(frame))
        await replies.commit(marks)

    async with transport.connect(story) as client, begin(client) as call:
        assert (await call.accepted()).page_count == 4
        assert not call.done_marks
        assert await receive_all(call) == sent
        assert (await call.first_token()).token_ids == [7]
        assert list(call.done_marks) == marks
        assert call.received_bytes == sum(sizes)
        assert await call.receive() is None
    assert seen == [REQUEST]


async def test_control_overtakes_queued_frames_and_send_waits_for_the_receiver(transport):
    progress, total = [], 400
    first_token_sent = asyncio.Event()

    async def story(request, replies):
        replies.accept(Accepted())
        replies.first_token(FirstToken(token_ids=[1]))
        for index in range(total):
            await replies.send(seal(bytes(100_000)))
            progress.append(index)
        first_token_sent.set()
        await replies.commit()

    async with transport.connect(story) as client, begin(client) as call:
        await call.first_token()
        await asyncio.sleep(0.3)
        stuck = len(progress)
        assert stuck < total // 2, "nothing holds the sender back"
        assert len(await receive_all(call)) == total == len(progress)


async def test_first_token_goes_before_frames_that_were_queued_earlier(transport):
    order = []

    async def story(request, replies):
        replies.accept(Accepted())
        await replies.send(seal(b"frame"))
        replies.first_token(FirstToken(token_ids=[1]))
        await replies.commit()

    async with transport.connect(story) as client, begin(client) as call:
        deliver = call._deliver

        async def spy(reply):
            order.append("frame" if isinstance(reply, SealedFrame | memoryview) else type(reply).__name__)
            await deliver(reply)

        call._deliver = spy
        assert await receive_all(call) == [b"frame"]
    assert order == ["Accepted", "FirstToken", "frame", "TransferDone"]


async def test_empty_transfer(transport):
    async def story(request, replies):
        replies.accept(Accepted())
        await replies.commit()

    async with transport.connect(story) as client, begin(client) as call:
        assert await call.receive() is None
        with pytest.raises(FrameError, match="without a first token"):
            await call.first_token()


@pytest.mark.parametrize("lie", [Summary(2, 10), Summary(1, 11)])
async def test_summary_that_does_not_match(transport, lie):
    async def story(request, replies):
        replies.accept(Accepted())
        await replies.send(seal(bytes(10)))
        replies._sent = lie
        await replies.commit()

    async with transport.connect(story) as client, begin(client) as call:
        with pytest.raises(FrameError, match=f"{lie.frame_count} frames and {lie.payload_bytes} bytes; 1 and 10"):
            await receive_all(call)


async def test_sender_aborts(transport):
    async def story(request, replies):
        replies.accept(Accepted())
        await replies.send(seal(b"frame"))
        await replies.abort("out of pages")
        await asyncio.Event().wait()

    async with transport.connect(story) as client, begin(client) as call:
        for wait in (call.receive, call.receive, call.first_token):
            with pytest.raises(TransferAbortedError, match="out of pages"):
                while True:
                    await wait()


@pytest.mark.parametrize("leave", ["abort", "cancel", "exit"])
async def test_receiver_gives_up(transport, leave):
    ends, over = [], asyncio.Event()

    async def story(request, replies):
        replies.accept(Accepted())

        async def send_forever():
            while True:
                await replies.send(seal(bytes(100_000)))

        sending = asyncio.create_task(send_forever(), name="prefill sending")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            with pytest.raises(TransferAbortedError):
                await sending
            with pytest.raises(TransferAbortedError):
                await replies.send(seal(b"more"))
            ends.append("refused")
            raise
        finally:
            over.set()

    async with transport.connect(story) as client:
        async with begin(client) as call:
            assert await call.receive() is not None
            waiting = asyncio.create_task(call.first_token())
            await asyncio.sleep(0)
            if leave == "abort":
                await call.abort("changed my mind")
            elif leave == "cancel":
                call.cancel()
        for attempt in (waiting, call.receive(), call.first_token()):
            with pytest.raises(TransferAbortedError if leave == "abort" else RequestCancelledError):
                await attempt
        await asyncio.wait_for(over.wait(), PATIENCE_S)
    assert ends == ["cancelled", "refused"]


async def test_cancelled_before_it_opens(transport):
    async def story(request, replies):
        raise AssertionError("a call that nobody wants any more was opened")

    async with transport.connect(story) as client:
        call = begin(client)
        call.cancel()
        with pytest.raises(RequestCancelledError):
            await call.accepted()


async def test_cancelling_the_receiving_task(transport):
    cancelled = asyncio.Event()

    async def story(request, replies):
        replies.accept(Accepted())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with transport.connect(story) as client:

        async def decode():
            async with begin(client) as call:
                await call.accepted()
                accepted.set()
                await call.receive()

        accepted = asyncio.Event()
        task = asyncio.create_task(decode())
        await asyncio.wait_for(accepted.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cancelled.wait(), PATIENCE_S)


async def test_deadline(transport):
    async def story(request, replies):
        replies.accept(Accepted())
        await asyncio.Event().wait()

    async with transport.connect(story) as client, begin(client, timeout_s=0.3) as call:
        with pytest.raises(DeadlineError):
            await call.receive()


@pytest.mark.parametrize(
    ("expectation", "message"),
    [
        (Expectation("r", 999, 1 << 20), "1000 bytes; at most 999"),
        (Expectation("r", 1000, 2999), "3000 bytes or more; at most 2999"),
    ],
)
async def test_oversize_is_refused(transport, expectation, message):
    async def story(request, replies):
        replies.accept(Accepted())
        for _ in range(3):
            await replies.send(seal(bytes(1000)))
        await replies.commit()

    async with transport.connect(story) as client, begin(client, expectation) as call:
        with pytest.raises(FrameError, match=message):
            await receive_all(call)


async def test_limits_are_inclusive(transport):
    async def story(request, replies):
        replies.accept(Accepted())
        for _ in range(3):
            await replies.send(seal(bytes(1000)))
        await replies.commit()

    async with transport.connect(story) as client, begin(client, Expectation("r", 1000, 3000)) as call:
        assert len(await receive_all(call)) == 3


async def test_nothing_reserved(transport):
    async def story(request, replies):
        replies.accept(Accepted())
        replies.first_token(FirstToken(token_ids=[1]))
        await replies.send(seal(b"frame"))
        await replies.commit()

    async with transport.connect(story) as client, begin(client, None) as call:
        with pytest.raises(FrameError, match="reserve first"):
            await call.receive()
        await call.first_token()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait((call._task,))
        call.reserve(ROOM)
        with pytest.raises(FrameError, match="before reserve"):
            await call.receive()


@pytest.mark.parametrize("when", ["computing", "sending"])
async def test_sender_is_lost(transport, when):
    async def story(request, replies):
        replies.accept(Accepted())
        await replies.send(seal(b"frame"))
        while when == "sending":
            await replies.send(seal(bytes(100_000)))
        await asyncio.Event().wait()

    async with transport.connect(story) as client, begin(client) as call:
        assert await call.receive() == b"frame"
        await transport.kill()
        with pytest.raises(WorkerUnavailableError):
            await receive_all(call)
        with pytest.raises(WorkerUnavailableError):
            await call.first_token()


@pytest.mark.parametrize(
    "error",
    [IncompatibleError("layouts differ"), OverloadedError("full", retry_after=2.5), FrameError("odd")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("accepts", [False, True])
async def test_error_of_the_story_reaches_everyone_who_waits(transport, error, accepts):
    async def story(request, replies):
        if accepts:
            replies.accept(Accepted())
            await replies.send(seal(b"frame"))
        raise error

    async with transport.connect(story) as client, begin(client) as call:
        waits = [call.first_token(), receive_all(call)] if accepts else [call.accepted(), call.receive()]
        for caught in await asyncio.gather(*waits, return_exceptions=True):
            assert type(caught) is type(error) and str(caught) == str(error) and vars(caught) == vars(error)


async def test_unexpected_error_of_the_story_is_logged_and_hidden(transport, caplog):
    async def story(request, replies):
        raise ZeroDivisionError("secret")

    async with transport.connect(story) as client, begin(client) as call:
        with pytest.raises(KvrailError, match="internal error") as caught:
            await call.accepted()
    assert "secret" not in str(caught.value) and "secret" in caplog.text


async def test_story_that_ends_without_commit(transport):
    async def story(request, replies):
        replies.accept(Accepted())
        await replies.send(seal(b"frame"))

    async with transport.connect(story) as client, begin(client) as call:
        with pytest.raises(KvrailError, match="without a commit"):
            await receive_all(call)


async def test_first_reply_must_be_accepted(transport):
    async def story(request, replies):
        replies.first_token(FirstToken(token_ids=[1]))
        await replies.commit()

    async with transport.connect(story) as client, begin(client) as call:
        with pytest.raises(FrameError, match="must be Accepted"):
            await call.first_token()


@pytest.mark.parametrize("twice", ["accept", "first_token"])
async def test_control_comes_once(transport, twice):
    async def story(request, replies):
        replies.accept(Accepted())
        replies.first_token(FirstToken())
        getattr(replies, twice)(Accepted() if twice == "accept" else FirstToken())
        await replies.commit()

    async with transport.connect(story) as client, begin(client) as call:
        with pytest.raises(FrameError, match=r"twice|second"):
            await receive_all(call)


async def test_nothing_follows_the_commit_and_the_story_may_tidy_up(transport):
    tidy = asyncio.Event()
    refused = []

    async def story(request, replies):
        replies.accept(Accepted())
        await replies.send(seal(b"frame"))
        await replies.commit()
        for late in (replies.send(seal(b"late")), replies.commit()):
            try:
                await late
            except FrameError as error:
                refused.append(str(error))
        await asyncio.sleep(0.1)
        tidy.set()

    async with transport.connect(story) as client:
        async with begin(client) as call:
            assert await receive_all(call) == [b"frame"]
        await asyncio.wait_for(tidy.wait(), PATIENCE_S)
    assert len(refused) == 2


async def test_calls_side_by_side(transport):
    async def story(request, replies):
        replies.accept(Accepted())
        for index in range(50):
            await replies.send(seal(f"{request.request_id}-{index}".encode() * 100))
        await replies.commit()

    async def one(client, name):
        async with client.prefill(PrefillRequest(request_id=name)) as call:
            call.reserve(ROOM)
            return await receive_all(call)

    async with transport.connect(story) as client:
        names = [f"r{index}" for index in range(8)]
        for name, frames in zip(names, await asyncio.gather(*(one(client, name) for name in names)), strict=True):
            assert frames == [f"{name}-{index}".encode() * 100 for index in range(50)]


async def test_drained_waits_until_what_was_queued_has_left(transport):
    drained = []

    async def story(request, replies):
        replies.accept(Accepted())
        for number in range(3):
            await replies.send(seal(bytes(300_000)))
            await replies.drained()
            drained.append((number, replies._queued_bytes, len(replies._frames)))
        await replies.drained()  # nothing is queued: at once
        await replies.commit()

    async with transport.connect(story) as client, begin(client) as call:
        async with asyncio.timeout(PATIENCE_S):
            assert len(await receive_all(call)) == 3
    assert drained == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


async def test_drained_ends_when_the_receiver_gives_up(transport):
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def story(request, replies):
        replies.accept(Accepted())
        try:
            for _ in range(400):  # more than any buffer between the two takes
                await replies.send(seal(bytes(1 << 20)))
                waiting.set()
                await replies.drained()
        finally:
            ended.set()

    room = Expectation("r", max_frame_bytes=1 << 20, max_total_bytes=1 << 30)
    async with transport.connect(story) as client, begin(client, room) as call:
        async with asyncio.timeout(PATIENCE_S):
            await waiting.wait()
            await call.abort("enough")
            await ended.wait()
