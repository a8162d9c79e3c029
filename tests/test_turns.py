"""Turns of clients at long work: the order in which they get through, and what is never begun."""

import asyncio
import threading

import pytest

from kvrail.runtime.turns import Turns


class Work:
    """Work that blocks until it is let go, and notes what was begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._begins: asyncio.Queue[str] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def of(self, name: str):
        self._gates[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            self._loop.call_soon_threadsafe(self._begins.put_nowait, name)
            self._gates[name].wait()
            return name

        return work

    async def next(self) -> str:
        """The work that begins next; it is let go."""
        name = await self._begins.get()
        self._gates[name].set()
        return name


async def _queued(turns: Turns, work: Work, client: str, name: str, cost: int = 1) -> "asyncio.Task[str]":
    task = asyncio.create_task(turns.run(client, work.of(name), cost))
    await asyncio.sleep(0)
    return task


async def test_a_client_with_much_work_waits_behind_its_own():
    turns, work = Turns(), Work()
    tasks = [await _queued(turns, work, "a", f"a{i}") for i in range(4)]
    tasks += [await _queued(turns, work, "b", f"b{i}") for i in range(2)]
    order = [await work.next() for _ in tasks]
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "a3", "b0", "b1"]


async def test_costly_work_counts_for_more():
    turns, work = Turns(), Work()
    tasks = [await _queued(turns, work, "a", f"a{i}", 30) for i in range(3)]
    tasks += [await _queued(turns, work, "b", f"b{i}", 10) for i in range(5)]
    order = [await work.next() for _ in tasks]
    assert order == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "a2"]
    await asyncio.gather(*tasks)


async def test_work_of_a_caller_that_has_gone_is_not_begun():
    turns, work = Turns(), Work()
    first, gone, last = [await _queued(turns, work, "a", name) for name in ("first", "gone", "last")]
    gone.cancel()
    assert [await work.next(), await work.next()] == ["first", "last"]
    assert await asyncio.gather(first, last) == ["first", "last"]
    assert work.begun == ["first", "last"] and gone.cancelled()


async def test_work_that_has_begun_keeps_its_place_though_its_caller_has_gone():
    turns, work = Turns(), Work()
    gone, last = [await _queued(turns, work, "a", name) for name in ("gone", "last")]
    while work.begun != ["gone"]:
        await asyncio.sleep(0.001)
    gone.cancel()
    await asyncio.wait([gone])
    assert work.begun == ["gone"]
    assert [await work.next(), await work.next()] == ["gone", "last"]
    assert await last == "last"


async def test_a_caller_cancelled_as_its_turn_comes_gives_the_place_back(monkeypatch):
    turns, work = Turns(), Work()
    first, gone = [await _queued(turns, work, "a", name) for name in ("first", "gone")]
    serve = turns._serve
    monkeypatch.setattr(turns, "_serve", lambda: (serve(), gone.cancel()))
    assert await work.next() == await first == "first"
    await asyncio.wait([gone])
    last = await _queued(turns, work, "a", "last")
    assert await work.next() == await last == "last"
    assert work.begun == ["first", "last"] and gone.cancelled()


async def test_as_much_runs_at_once_as_there_are_places():
    turns, work = Turns(2), Work()
    tasks = [await _queued(turns, work, "a", name) for name in ("one", "two", "three")]
    while len(work.begun) < 2:
        await asyncio.sleep(0.001)
    assert sorted(work.begun) == ["one", "two"]
    assert sorted([await work.next() for _ in tasks]) == ["one", "three", "two"]
    await asyncio.gather(*tasks)


async def test_an_error_of_the_work_is_its_callers():
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        await turns.run("a", lambda: 1 // 0)
    assert await turns.run("a", lambda: 1) == 1
