"""The pool of regions: none overlap, all come back, nobody starves."""

import asyncio
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.errors import FrameError, OverloadedError
from kvrail.transport.regions import ALIGNMENT, RegionPool

PAGES = 16
SIZES = st.integers(0, PAGES * ALIGNMENT)
ACTIONS = st.lists(
    st.one_of(SIZES, st.tuples(st.sampled_from(["release", "cancel"]), st.integers(0, 100))), max_size=60
)


def pool_of(pages=PAGES):
    return RegionPool(torch.zeros(pages * ALIGNMENT, dtype=torch.uint8))


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


def check_apart(pool, regions):
    """Each region is marked through and through; a mark that is gone was overwritten by another."""
    for mark, region in enumerate(regions):
        region.tensor.fill_(mark % 251 + 1)
    for mark, region in enumerate(regions):
        assert bool((region.tensor == mark % 251 + 1).all())
    rooms = sum(max(1, -(-region.tensor.numel() // ALIGNMENT)) * ALIGNMENT for region in regions)
    assert pool.free_bytes == pool.buffer.numel() - rooms


@settings(deadline=None, max_examples=150)
@given(ACTIONS)
def test_regions_never_overlap_and_all_come_back_in_order(actions):
    async def play():
        pool, takes, held = pool_of(), [], []  # takes: those that wait, in the order of their calls

        async def collect():
            await settle()
            waits = [task.done() for task in takes]
            assert waits == sorted(waits, reverse=True), "one was overtaken"
            while takes and takes[0].done():
                held.append(takes.pop(0).result())
            check_apart(pool, held)

        for action in actions:
            match action:
                case ("release", which) if held:
                    region = held.pop(which % len(held))
                    region.release()
                    region.release()
                case ("cancel", which) if takes:
                    task = takes.pop(which % len(takes))
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                case int(size):
                    takes.append(asyncio.create_task(pool.take(size)))
            await collect()
        while takes:  # whoever waits is served once others go
            assert held, "someone waits for an empty pool"
            held.pop(0).release()
            await collect()
        for region in held:
            region.release()
        assert pool.free_bytes == pool.buffer.numel()
        (await asyncio.wait_for(pool.take(pool.buffer.numel()), 5)).release()  # joined again to one piece

    asyncio.run(play())


async def test_a_large_one_is_not_overtaken_by_small_ones():
    pool = pool_of()
    held = [await pool.take(ALIGNMENT) for _ in range(PAGES)]
    large = asyncio.create_task(pool.take(PAGES * ALIGNMENT))
    await settle()
    small = [asyncio.create_task(pool.take(1)) for _ in range(3)]
    for region in held:
        await settle()
        assert not large.done() and not any(task.done() for task in small)
        region.release()
    whole = await large
    await settle()
    assert not any(task.done() for task in small)
    whole.release()
    for task in small:
        (await task).release()
    assert pool.free_bytes == pool.buffer.numel()


async def test_one_that_is_given_up_lets_those_behind_it_through():
    pool = pool_of()
    held = await pool.take((PAGES - 1) * ALIGNMENT)
    large = asyncio.create_task(pool.take(2 * ALIGNMENT))
    small = asyncio.create_task(pool.take(1))
    await settle()
    assert not small.done()
    large.cancel()
    (await asyncio.wait_for(small, 5)).release()
    held.release()
    assert pool.free_bytes == pool.buffer.numel()


async def test_one_that_is_given_up_in_the_very_turn_that_serves_it_leaves_nothing():
    pool = pool_of()
    held = await pool.take(PAGES * ALIGNMENT)
    first, second = (asyncio.create_task(pool.take(PAGES * ALIGNMENT)) for _ in range(2))
    await settle()
    held.release()  # the first is served, and does not know it yet
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    (await asyncio.wait_for(second, 5)).release()
    assert pool.free_bytes == pool.buffer.numel()


async def test_releases_of_many_threads_count_once():
    pool = pool_of()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            region, start = await pool.take(ALIGNMENT), threading.Barrier(4)

            def release(region=region, start=start):
                start.wait()
                region.release()

            threads = [threading.Thread(target=release) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            await settle()
            assert pool.free_bytes == pool.buffer.numel()
    finally:
        sys.setswitchinterval(interval)


async def test_what_can_never_fit_is_refused_and_harms_nobody():
    pool = pool_of()
    with pytest.raises(FrameError, match=f"{PAGES * ALIGNMENT + 1} bytes"):
        await pool.take(PAGES * ALIGNMENT + 1)
    region = await pool.take(PAGES * ALIGNMENT)
    assert region.payload.nbytes == PAGES * ALIGNMENT and region.payload.format == "B"
    region.release()


def test_a_release_after_the_loop_has_ended_does_nothing():
    async def take():
        return await pool_of().take(1)

    asyncio.run(take()).release()


async def test_who_waits_too_long_learns_that_the_memory_is_full_and_leaves_its_place():
    pool = RegionPool(torch.zeros(2 * ALIGNMENT, dtype=torch.uint8), patience_s=0.2)
    held = await pool.take(ALIGNMENT)
    with pytest.raises(OverloadedError, match=r"no 8192 bytes to receive into were free for 0\.18 s; give more memory"):
        await pool.take(2 * ALIGNMENT)
    (await asyncio.wait_for(pool.take(ALIGNMENT), 30)).release()
    held.release()
    assert pool.free_bytes == 2 * ALIGNMENT
