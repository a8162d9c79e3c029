"""Payloads of earlier stages: which of them are kept for whom, and that none is left behind."""

import pytest

from kvrail.codec.base import BlockSpec
from kvrail.codec.frame import FrameHeader
from kvrail.transfer.stages import KeptStages

SPEC = BlockSpec("bfloat16", 1, 2, 16, 2, 8, 8, scaled=False)


class Observer:
    """Adds up what it is told."""

    total = 0

    def kept(self, change):
        self.total += change


@pytest.fixture
def observer():
    return Observer()


def header(stage, first_page=0, num_stages=3, first_layer=0):
    return FrameHeader("r", "c", stage, num_stages, SPEC, first_layer, first_page, 0)


def add(kept, *args, **options):
    """The payloads given, as bytes; a payload names its stage and place."""
    made = header(*args, **options)
    region = bytearray(f"{made.stage} of {made.first_layer}, {made.first_page}".encode())
    given = [bytes(each) for each in kept.add(made, memoryview(region))]
    region[:] = bytes(len(region))  # the next payload lands there
    return given


def test_a_stage_is_given_those_before_it_of_the_same_pages(observer):
    with KeptStages(observer, True) as kept:
        assert add(kept, 0, 0) == [b"0 of 0, 0"]
        assert add(kept, 0, 2) == [b"0 of 0, 2"]
        assert add(kept, 0, 0, first_layer=1) == [b"0 of 1, 0"]
        assert add(kept, 1, 2) == [b"0 of 0, 2", b"1 of 0, 2"]
        assert add(kept, 1, 0) == [b"0 of 0, 0", b"1 of 0, 0"]
        assert observer.total == 5 * 9
        assert add(kept, 2, 0) == [b"0 of 0, 0", b"1 of 0, 0", b"2 of 0, 0"]
        assert observer.total == 3 * 9
        assert add(kept, 2, 2) == [b"0 of 0, 2", b"1 of 0, 2", b"2 of 0, 2"]
        assert observer.total == 9
    assert observer.total == 0


def test_of_one_stage_nothing_is_kept(observer):
    with KeptStages(observer, True) as kept:
        for page in (0, 2, 4):
            assert add(kept, 0, page, num_stages=1) == [f"0 of 0, {page}".encode()]
        assert observer.total == 0


def test_what_is_kept_goes_with_the_attempt(observer):
    with pytest.raises(RuntimeError), KeptStages(observer, True) as kept:
        add(kept, 0, 0)
        add(kept, 1, 0)
        add(kept, 0, 2)
        raise RuntimeError
    assert observer.total == 0
    with KeptStages(observer, True) as kept:
        assert add(kept, 0, 0) == [b"0 of 0, 0"]
        assert observer.total == 9
    assert observer.total == 0


def test_nothing_is_kept_for_a_codec_that_completes_what_lies_in_the_pages(observer):
    with KeptStages(observer, False) as kept:
        assert add(kept, 0, 0) == [b"0 of 0, 0"]
        assert add(kept, 1, 0) == [b"1 of 0, 0"]
        assert observer.total == 0
