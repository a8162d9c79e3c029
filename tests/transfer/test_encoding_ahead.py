"""One block's encoding is launched while the one before is awaited, unless its pages are still to come."""

import threading
import time

import pytest

from kvrail.codec import registry
from tests.transfer.ends import LAYOUT, PAGES, Transfers

A_LAYER = PAGES * LAYOUT.page_bytes // LAYOUT.num_layers


class Event:
    """A CUDA event that has not happened."""

    def query(self):
        return False


class Encoding:
    """One that is watched. second: the first waits for the launch of the second."""

    def __init__(self, real, number, told, second):
        self._real, self._number, self._told, self._second = real, number, told, second

    def stages(self):
        if self._number == 0 and self._second is not None:
            assert self._second.wait(10), "nothing was launched behind the first block"
        time.sleep(0.02)  # more could be launched
        stages = self._real.stages()
        self._told.append(("encoded", self._number))
        return stages

    def stats(self):
        return self._real.stats()


@pytest.fixture
def watch(monkeypatch):
    """Has raw's encodings tell in which order they are launched and complete."""

    def begin(second):
        told, encode = [], type(registry.get("raw")).encode

        def watched(codec, pages, **named):
            number = sum(what == "launched" for what, _ in told)
            told.append(("launched", number))
            if number == 1 and second is not None:
                second.set()
            return Encoding(encode(codec, pages, **named), number, told, second)

        monkeypatch.setattr(type(registry.get("raw")), "encode", watched)
        return told

    return begin


async def test_the_next_block_is_launched_while_one_is_awaited(watch):
    told = watch(threading.Event())
    await Transfers("raw", frame_bytes=A_LAYER, cached_pages=PAGES).run()
    assert told[:3] == [("launched", 0), ("launched", 1), ("encoded", 0)]
    assert [number for what, number in told if what == "encoded"] == list(range(LAYOUT.num_layers))
    ahead = [("launched", number) for number in range(2, LAYOUT.num_layers)]
    assert all(told.index(("encoded", number - 2)) < told.index((what, number)) for what, number in ahead)


async def test_a_block_whose_pages_are_not_complete_is_launched_alone(watch):
    """What the stream gets behind it would wait for these pages, too."""
    told = watch(None)
    await Transfers("raw", cached_pages=0, ready=Event()).run()
    assert len(told) >= 4
    assert told == [(what, number) for number in range(len(told) // 2) for what in ("launched", "encoded")]
