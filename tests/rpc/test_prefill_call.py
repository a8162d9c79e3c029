"""What holds for a prefill call, over gRPC and in process."""

import asyncio

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
from kvrail.rpc.prefill import replies as prefill_replies
from kvrail.rpc.prefill.call import MAX_UNTAKEN
from kvrail.transport.base import Announcement
from kvrail.wire.v1.prefill_pb2 import Accepted, FirstToken, PrefillRequest
from tests.inproc.prefill import serve

REQUEST = PrefillRequest(request_id="r", prompt_token_ids=[1, 2, 3])
PATIENCE_S = 20


def frame(head=b"frame", payload_bytes=10, on_device=False):
    return Announcement(head, payload_bytes, on_device)


async def receive_all(call):
    frames = []
    while (announced := await call.announced()) is not None:
        frames.append(announced)
    return frames


@pytest.fixture(autouse=True)
async def nothing_pending():
    """A test leaves no task of ours behind."""
    yield
    async with asyncio.timeout(PATIENCE_S):
        while left := [task for task in asyncio.all_tasks() if task.get_name().startswith("prefill ")]:
            await asyncio.wait(left)


async def test_a_whole_call(transport):
    sizes = [1, 2, 100, 4095, 4096, 4097, 100_000, 3, 0, 1 << 40]
    sent = [frame(bytes([number]) * number, size, bool(number % 2)) for number, size in enumerate(sizes)]
    seen = []

    async def handler(request, replies):
        seen.append(request)
        replies.accept(Accepted(codec="raw", first_page=3, page_count=4))
        for each in sent[:5]:
            replies.announce(each)
        replies.first_token(FirstToken(token_ids=[7]))
        for each in sent[5:]:
            replies.announce(each)
        await replies.commit()

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        assert (await call.accepted()).page_count == 4
        assert await receive_all(call) == sent
        assert (await call.first_token()).token_ids == [7]
        assert await call.announced() is None
    assert seen == [REQUEST]


async def test_empty_transfer(transport):
    async def handler(request, replies):
        replies.accept(Accepted())
        await replies.commit()

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        assert await call.announced() is None
        with pytest.raises(FrameError, match="without a first token"):
            await call.first_token()


@pytest.mark.parametrize("lie", [(2, 10), (1, 11)])
async def test_summary_that_does_not_match(transport, lie):
    async def handler(request, replies):
        replies.accept(Accepted())
        replies.announce(frame())
        replies._frame_count, replies._payload_bytes = lie
        await replies.commit()

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        with pytest.raises(FrameError, match=f"{lie[0]} frames and {lie[1]} bytes; 1 and 10 were"):
            await receive_all(call)


async def test_a_receiver_that_takes_no_replies_is_given_up(monkeypatch):
    monkeypatch.setattr(prefill_replies, "TAKEN_WITHIN_S", 0.05)
    over = asyncio.Event()

    async def handler(request, replies):
        try:
            replies.accept(Accepted())
            await replies.commit()
        finally:
            over.set()

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(TransferAbortedError, match="took no reply for"):
            await serve(handler, REQUEST, lambda reply: asyncio.sleep(3600))
    assert over.is_set()


@pytest.mark.parametrize("leave", ["cancel", "exit"])
async def test_receiver_gives_up(transport, leave):
    ends, over = [], asyncio.Event()

    async def handler(request, replies):
        replies.accept(Accepted())

        async def send_forever():
            while True:
                replies.announce(frame())
                await asyncio.sleep(0.01)

        sending = asyncio.create_task(send_forever(), name="prefill sending")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            with pytest.raises(TransferAbortedError):
                await sending
            with pytest.raises(TransferAbortedError):
                replies.announce(frame())
            ends.append("refused")
            raise
        finally:
            over.set()

    async with transport.connect(handler) as client:
        async with client.prefill(REQUEST) as call:
            assert await call.announced() is not None
            waiting = asyncio.create_task(call.first_token())
            await asyncio.sleep(0)
            if leave == "cancel":
                call.cancel()
        for attempt in (waiting, call.announced(), call.first_token()):
            with pytest.raises(RequestCancelledError):
                await attempt
        await asyncio.wait_for(over.wait(), PATIENCE_S)
    assert ends == ["cancelled", "refused"]


async def test_cancelled_before_it_opens(transport):
    async def handler(request, replies):
        raise AssertionError("a call that nobody wants any more was opened")

    async with transport.connect(handler) as client:
        call = client.prefill(REQUEST)
        call.cancel()
        with pytest.raises(RequestCancelledError):
            await call.accepted()


async def test_cancelling_the_receiving_task(transport):
    cancelled = asyncio.Event()

    async def handler(request, replies):
        replies.accept(Accepted())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with transport.connect(handler) as client:

        async def decode():
            async with client.prefill(REQUEST) as call:
                await call.accepted()
                accepted.set()
                await call.announced()

        accepted = asyncio.Event()
        task = asyncio.create_task(decode())
        await asyncio.wait_for(accepted.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cancelled.wait(), PATIENCE_S)


async def test_deadline(transport):
    async def handler(request, replies):
        replies.accept(Accepted())
        await asyncio.Event().wait()

    async with transport.connect(handler) as client, client.prefill(REQUEST, timeout_s=0.3) as call:
        with pytest.raises(DeadlineError):
            await call.announced()


@pytest.mark.parametrize("when", ["computing", "sending"])
async def test_sender_is_lost(transport, when):
    async def handler(request, replies):
        replies.accept(Accepted())
        replies.announce(frame())
        while when == "sending":
            replies.announce(frame())
            await asyncio.sleep(0.001)
        await asyncio.Event().wait()

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        assert await call.announced() == frame()
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
async def test_error_of_the_handler_reaches_everyone_who_waits(transport, error, accepts):
    async def handler(request, replies):
        if accepts:
            replies.accept(Accepted())
            replies.announce(frame())
        raise error

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        waits = [call.first_token(), receive_all(call)] if accepts else [call.accepted(), call.announced()]
        for caught in await asyncio.gather(*waits, return_exceptions=True):
            assert type(caught) is type(error) and str(caught) == str(error) and vars(caught) == vars(error)


async def test_unexpected_error_of_the_handler_is_logged_and_hidden(transport, caplog):
    async def handler(request, replies):
        raise ZeroDivisionError("secret")

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        with pytest.raises(KvrailError, match="internal error") as caught:
            await call.accepted()
    assert "secret" not in str(caught.value) and "secret" in caplog.text


async def test_handler_that_ends_without_commit(transport):
    async def handler(request, replies):
        replies.accept(Accepted())
        replies.announce(frame())

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        with pytest.raises(KvrailError, match="without a commit"):
            await receive_all(call)


async def test_first_reply_must_be_accepted(transport):
    async def handler(request, replies):
        replies.first_token(FirstToken(token_ids=[1]))
        await replies.commit()

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        with pytest.raises(FrameError, match="before it accepted"):
            await call.first_token()


@pytest.mark.parametrize("twice", ["accept", "first_token"])
async def test_control_comes_once(transport, twice):
    async def handler(request, replies):
        replies.accept(Accepted())
        replies.first_token(FirstToken())
        getattr(replies, twice)(Accepted() if twice == "accept" else FirstToken())
        await replies.commit()

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        with pytest.raises(FrameError, match=r"twice|second"):
            await receive_all(call)


async def test_nothing_follows_the_commit_and_the_handler_may_tidy_up(transport):
    tidy = asyncio.Event()
    refused = []

    async def handler(request, replies):
        replies.accept(Accepted())
        replies.announce(frame())
        await replies.commit()

        async def announce():
            replies.announce(frame())

        for late in (announce(), replies.commit()):
            try:
                await late
            except FrameError as error:
                refused.append(str(error))
        await asyncio.sleep(0.1)
        tidy.set()

    async with transport.connect(handler) as client:
        async with client.prefill(REQUEST) as call:
            assert await receive_all(call) == [frame()]
        await asyncio.wait_for(tidy.wait(), PATIENCE_S)
    assert len(refused) == 2


async def test_a_receiver_that_leaves_with_the_commit_in_its_hands_ends_no_call():
    """It has the last reply while the sender still waits for that to have left."""
    tidied = []

    async def handler(request, replies):
        replies.accept(Accepted())
        await replies.commit()
        tidied.append(True)

    async def deliver(reply):
        if reply.HasField("done"):
            telling.cancel()
            await asyncio.Event().wait()

    telling = asyncio.create_task(serve(handler, REQUEST, deliver))
    with pytest.raises(asyncio.CancelledError):
        await telling
    assert tidied == [True]


async def test_calls_side_by_side(transport):
    async def handler(request, replies):
        replies.accept(Accepted())
        for index in range(50):
            replies.announce(frame(f"{request.request_id}-{index}".encode(), index))
        await replies.commit()

    async def one(client, name):
        async with client.prefill(PrefillRequest(request_id=name)) as call:
            return await receive_all(call)

    async with transport.connect(handler) as client:
        names = [f"r{index}" for index in range(8)]
        for name, frames in zip(names, await asyncio.gather(*(one(client, name) for name in names)), strict=True):
            assert frames == [frame(f"{name}-{index}".encode(), index) for index in range(50)]


async def test_announcements_that_nobody_takes_are_bounded(transport):
    async def handler(request, replies):
        replies.accept(Accepted())
        for _ in range(MAX_UNTAKEN + 1):
            replies.announce(frame())
        await replies.commit()

    async with transport.connect(handler) as client, client.prefill(REQUEST) as call:
        await call.accepted()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait((call._task,))
        with pytest.raises(FrameError, match=f"more than {MAX_UNTAKEN} frames"):
            await call.announced()
