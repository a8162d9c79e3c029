"""Events cross from threads to the loop: all of them, in order, with one wake-up for all that wait."""

import asyncio
import threading
from types import SimpleNamespace

from kvrail.engine.aio import EventRouter
from kvrail.engine.request.events import Drafted, Finished

ENGINE = SimpleNamespace(submit=lambda request: None, abort=lambda request_id: None)


def event(number: int) -> Drafted:
    return Drafted(0, (number,), "")


async def numbers(stream) -> list[int]:
    return [each.token_ids[0] async for each in stream if isinstance(each, Drafted)]


async def test_events_before_the_loop_looks_wake_it_once(monkeypatch):
    loop = asyncio.get_running_loop()
    router = EventRouter(loop)
    streams = [router.open(ENGINE, SimpleNamespace(request_id=name)) for name in "ab"]
    calls = []
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(router, "_loop", SimpleNamespace(
        is_closed=lambda: False, call_soon_threadsafe=lambda *call: (calls.append(call), wake(*call))
    ))  # fmt: skip
    for turn in range(2):
        for number in range(10):
            router.deliver([("a", event(number)), ("b", event(-number)), ("gone", event(0))])
        router.deliver([])
        await asyncio.sleep(0.01)
        assert len(calls) == turn + 1
    router.deliver([("a", Finished(0)), ("b", Finished(0))])
    assert await numbers(streams[0]) == [*range(10), *range(10)]
    assert await numbers(streams[1]) == [-number for number in (*range(10), *range(10))]


async def test_no_event_of_a_thread_is_lost_or_overtaken():
    router = EventRouter(asyncio.get_running_loop())
    streams = [router.open(ENGINE, SimpleNamespace(request_id=str(name))) for name in range(4)]

    def feed(name: str) -> None:
        for number in range(5000):
            router.deliver([(name, event(number))])
        router.deliver([(name, Finished(0))])

    threads = [threading.Thread(target=feed, args=(str(name),)) for name in range(4)]
    for thread in threads:
        thread.start()
    for found in await asyncio.gather(*(numbers(stream) for stream in streams)):
        assert found == list(range(5000))
    for thread in threads:
        thread.join()
