import asyncio

from services.prefill.link import Link


async def test_the_oldest_request_goes_first():
    link, done = Link(slots=1), []

    async def send(order, frames):
        for _ in range(frames):
            async with link.turn(order):
                await asyncio.sleep(0)
                done.append(order)

    await asyncio.gather(send(3, 4), send(1, 4), send(2, 4))
    assert done == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


async def test_slots_bound_what_is_in_flight_and_come_back():
    link, now, most = Link(slots=2), 0, 0

    async def send(order):
        nonlocal now, most
        async with link.turn(order):
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
    link = Link(slots=1)
    first = link.turn(0)
    await first.__aenter__()

    async def hold(order):
        async with link.turn(order):
            await asyncio.sleep(3600)

    late = asyncio.create_task(hold(1))
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)  # gives the slot to `late`, which is cancelled before it runs again
    late.cancel()
    await asyncio.wait([late])

    async def quick():
        async with link.turn(2):
            return True

    assert await asyncio.wait_for(quick(), 1)
