import asyncio

from kvrail.config.settings import PrefillSettings
from kvrail.services.prefill.servicer import PrefillServicer
from kvrail.transfer import peers
from kvrail.transfer.send_queue import MOST_LENT, PATIENCE, SendQueue

ROOM = 1 << 30


async def test_the_oldest_request_goes_first():
    queue, done = SendQueue(ROOM, slots=1), []

    async def send(order, frames):
        for _ in range(frames):
            async with queue.turn(order):
                await asyncio.sleep(0)
                done.append(order)

    await asyncio.gather(send(3, 4), send(1, 4), send(2, 4))
    assert done == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


async def test_slots_bound_what_is_under_way_and_come_back():
    queue, now, most = SendQueue(ROOM, slots=2), 0, 0

    async def send(order):
        nonlocal now, most
        async with queue.turn(order):
            now += 1
            most = max(most, now)
            try:
                await asyncio.sleep(0.001)
            finally:
                now -= 1

    tasks = [asyncio.create_task(send(order)) for order in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 2
    await asyncio.wait_for(asyncio.gather(send(1), send(2)), 1)  # cancelled ones kept no slot


async def test_a_turn_that_came_too_late_is_passed_on():
    queue = SendQueue(ROOM, slots=1)
    first = queue.turn(0)
    await first.__aenter__()

    async def hold(order):
        async with queue.turn(order):
            await asyncio.sleep(3600)

    late = asyncio.create_task(hold(1))
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)  # gives the slot to `late`, which is cancelled before it runs again
    late.cancel()
    await asyncio.wait([late])

    async def quick():
        async with queue.turn(2):
            return True

    assert await asyncio.wait_for(quick(), 1)


class Sender:
    """Sends frames in turns and writes down in which order they left."""

    def __init__(self, queue):
        self.queue = queue
        self.left = []

    async def frames(self, order, count, *, later=False):
        for _ in range(count):
            async with self.queue.turn(order, later=later):
                await asyncio.sleep(0)
                self.left.append((order, later))


async def test_the_first_stage_of_a_later_request_goes_before_a_later_stage_of_an_earlier_one():
    sender = Sender(SendQueue(ROOM, slots=1, patience=100))
    await asyncio.gather(sender.frames(1, 3, later=True), sender.frames(1, 2), sender.frames(2, 4), sender.frames(3, 1))
    assert sender.left == [(1, False)] * 2 + [(2, False)] * 4 + [(3, False)] + [(1, True)] * 3


async def test_later_stages_leave_oldest_first_once_nothing_else_waits():
    sender = Sender(SendQueue(ROOM, slots=1))
    await asyncio.gather(sender.frames(2, 2, later=True), sender.frames(1, 2, later=True))
    assert sender.left == [(1, True)] * 2 + [(2, True)] * 2


async def test_a_later_stage_is_passed_by_so_many_first_stages_at_most():
    sender = Sender(SendQueue(ROOM, slots=1))
    await asyncio.gather(sender.frames(5, 4, later=True), *(sender.frames(order, 20) for order in range(5)))
    places = [place for place, (_, later) in enumerate(sender.left) if later]
    assert places == [PATIENCE, 2 * PATIENCE + 1, 3 * PATIENCE + 2, 4 * PATIENCE + 3]


async def test_at_the_bound_of_memory_later_stages_go_first_until_there_is_room():
    queue = SendQueue(100, slots=1, patience=1000)
    left = []

    async def first():
        for _ in range(20):
            async with queue.turn(1):
                await asyncio.sleep(0)
                queue.hold(30)
                left.append(queue.held_bytes)
                later.put_nowait(30)
        later.put_nowait(None)

    async def drain():
        while (size := await later.get()) is not None:
            async with queue.turn(1, later=True):
                await asyncio.sleep(0)
                left.append(-size)
            queue.release(size)

    later = asyncio.Queue()
    await asyncio.wait_for(asyncio.gather(first(), drain()), 5)
    held = [size for size in left if size > 0]
    assert held[:4] == [30, 60, 90, 120] and max(held) == 120  # one turn's worth above the bound
    assert queue.held_bytes == 0 and len(left) == 40


async def test_a_full_memory_that_nobody_can_empty_by_a_turn_holds_first_stages_until_it_is_given_back():
    queue = SendQueue(10, slots=1)
    queue.hold(10)
    waiting = asyncio.create_task(Sender(queue).frames(0, 1))
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    queue.release(10)
    await asyncio.wait_for(waiting, 5)


async def test_a_cancelled_later_stage_does_not_keep_its_place():
    queue = SendQueue(ROOM, slots=1, patience=0)
    sender = Sender(queue)
    async with queue.turn(0):
        gone = asyncio.create_task(sender.frames(0, 1, later=True))
        rest = asyncio.create_task(sender.frames(1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
    await asyncio.wait_for(rest, 5)
    assert sender.left == [(1, False)] * 2


async def test_turns_that_are_stuck_do_not_keep_others_from_theirs():
    queue, done = SendQueue(ROOM, slots=2, stuck_s=0.05), asyncio.Event()

    async def stuck():
        async with queue.turn(0):
            await done.wait()

    async def quick(order):
        async with queue.turn(order):
            return order

    held = [asyncio.create_task(stuck()) for _ in range(2)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.gather(*map(quick, range(1, 9))), 10) == list(range(1, 9))
    done.set()
    await asyncio.gather(*held)
    assert queue._free == queue.slots  # what was lent is not given back twice


async def test_no_more_is_lent_than_the_bound_says():
    queue, done, begun = SendQueue(ROOM, slots=1, stuck_s=0.01), asyncio.Event(), 0

    async def stuck():
        nonlocal begun
        async with queue.turn(0):
            begun += 1
            await done.wait()

    held = [asyncio.create_task(stuck()) for _ in range(20)]
    async with asyncio.timeout(10):
        while begun < 1 + MOST_LENT:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert begun == 1 + MOST_LENT
    done.set()
    await asyncio.gather(*held)
    assert (begun, queue._free) == (20, 1)


async def test_memory_that_a_stuck_receiver_fills_does_not_keep_others_from_theirs():
    queue, done = SendQueue(10, slots=1, stuck_s=0.05), asyncio.Event()

    async def stuck():
        async with queue.turn(0, later=True):
            await done.wait()

    queue.hold(10)
    held = asyncio.create_task(stuck())
    await asyncio.sleep(0)
    await asyncio.wait_for(Sender(queue).frames(1, 3), 10)
    queue.hold(10)
    waiting = asyncio.create_task(Sender(queue).frames(2, 1))
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()  # as much once more, and no more
    done.set()
    queue.release(20)
    await asyncio.gather(held, waiting)


def test_a_prefill_worker_forgets_queues_of_hosts_that_are_gone(monkeypatch):
    now = 0.0
    monkeypatch.setattr(peers, "monotonic", lambda: now)
    servicer = PrefillServicer(None, None, None, None, None, PrefillSettings(served_model_name="m"))
    first = servicer._queue("host 0", False)
    for number in range(1, 1000):
        servicer._queue(f"host {number}", False)
        assert servicer._queue("host 0", False) is first
    assert servicer._queue("host 0", True) is not first
    assert len(servicer._queues) == 256
    now = 3601.0
    servicer._queue("host 1000", False)
    assert list(servicer._queues) == [("host 1000", False)]
