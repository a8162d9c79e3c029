import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.codec.base import BlockSpec
from kvrail.codec.frame import FrameFormatError, FrameHeader
from kvrail.transfer.guard import FrameGuard, Transfer
from kvrail.transfer.sizes import max_payload_bytes

WHOLE = BlockSpec("bfloat16", 4, 6, 16, 2, 8, 8, False)  # layers 0 to 4, pages 10 to 16
TRANSFER = Transfer("r", "lynx", 2, WHOLE, 10)


def frame(sequence, stage=0, layers=(0, 4), pages=(10, 16), heads=(0, 2), **changes):
    sizes = [end - first for first, end in (layers, pages, heads)]
    spec = replace(WHOLE, num_layers=sizes[0], num_pages=sizes[1], num_kv_heads=sizes[2])
    return replace(FrameHeader("r", "lynx", stage, 2, spec, layers[0], pages[0], sequence, heads[0]), **changes)


def land(guard, header):
    """Admitted frames count once they are in the pages."""
    missing = guard.missing()
    guard.admit(header, max_payload_bytes(header.spec))
    assert guard.missing() == missing
    guard.landed(header)


def test_a_payload_that_no_stage_can_have_is_refused():
    guard = FrameGuard(TRANSFER)
    with pytest.raises(FrameFormatError, match="at most"):
        guard.admit(frame(0), max_payload_bytes(WHOLE) + 1)
    land(guard, frame(0))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 2), st.randoms(use_true_random=False))
def test_each_head_of_each_page_exactly_once_in_any_order_of_blocks(layer_step, page_step, head_step, random):
    blocks = [
        ((layer, min(layer + layer_step, 4)), (page, min(page + page_step, 16)), (head, head + head_step))
        for layer, page, head in itertools.product(
            range(0, 4, layer_step), range(10, 16, page_step), range(0, 2, head_step)
        )
    ]
    order = [block for block in blocks for _ in range(2)]
    random.shuffle(order)
    guard, seen = FrameGuard(TRANSFER), []
    for sequence, block in enumerate(order):
        assert not guard.complete()
        land(guard, frame(sequence, seen.count(block), *block))
        seen.append(block)
        for stage in range(2):
            assert guard.complete(stage) == all(seen.count(one) > stage for one in blocks)
        left = sum((2 - seen.count(one)) * math.prod(end - first for first, end in one) for one in blocks)
        assert guard.missing() == left
    assert guard.complete()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (None, frame(1), "sequence 1; the next is 0"),
        (frame(0, pages=(10, 12)), frame(0, pages=(12, 14)), "sequence 0; the next is 1"),
        (frame(0), frame(1), "stage 0; its block's next is 1"),
        (None, frame(0, stage=1), "stage 1; its block's next is 0"),
        (frame(0, pages=(10, 12)), frame(1, pages=(11, 13)), "of layer 0, head 0 for the second time"),
        (frame(0, layers=(0, 2)), frame(1, layers=(1, 3), pages=(15, 16)), "of layer 1, head 0 for the second time"),
        (frame(0), frame(1, stage=1, pages=(10, 12)), "stage 1; its block's next is 0"),
        (frame(0, heads=(0, 1)), frame(1), "of layer 0, head 0 for the second time"),
        (frame(0, heads=(1, 2)), frame(1), "of layer 0, head 1 for the second time"),
        (frame(0), frame(1, stage=1, heads=(0, 1)), "stage 1; its block's next is 0"),
        (None, frame(0, heads=(1, 3)), "heads 1 to 3; this transfer has 2"),
        (None, frame(0, first_head=(1 << 32) - 1), "heads 4294967295 to 4294967297"),
        (None, frame(0, parameters_id=1), "parameters_id 1"),
        (None, frame(0, request_id="s"), "request_id 's'"),
        (None, frame(0, codec="raw"), "codec 'raw'"),
        (None, frame(0, num_stages=3), "num_stages 3"),
        (None, frame(0, spec=replace(WHOLE, dtype="float16")), "float16"),
        (None, frame(0, spec=replace(WHOLE, key_dim=9)), "key_dim=9"),
        (None, frame(0, spec=replace(WHOLE, scaled=True)), "scaled=True"),
        (None, frame(0, layers=(3, 5)), "layers 3 to 5"),
        (None, frame(0, pages=(9, 11)), "pages 9 to 11"),
        (None, frame(0, pages=(15, 17)), "pages 15 to 17"),
    ],
)
def test_frame_that_does_not_belong_is_refused_and_changes_nothing(first, second, message):
    guard = FrameGuard(TRANSFER)
    if first is not None:
        land(guard, first)
    before = guard.missing()
    with pytest.raises(FrameFormatError, match=message):
        guard.admit(second, 1)
    assert guard.missing() == before and not guard.complete()


def test_refused_overlap_marks_none_of_its_pages():
    guard = FrameGuard(TRANSFER)
    land(guard, frame(0, layers=(1, 2), pages=(10, 11)))
    with pytest.raises(FrameFormatError):
        guard.admit(frame(1, layers=(0, 2), pages=(10, 11)), 1)
    land(guard, frame(1, layers=(0, 1), pages=(10, 11)))
    assert guard.missing() == 2 * (2 * 24 - 2)


@given(st.integers(8, 18), st.randoms(use_true_random=False))
def test_coarse_is_complete_with_stage_0_of_all_and_every_stage_of_the_recent_pages(recent, random):
    """Over any order of blocks, against the set of what has come."""
    guard = FrameGuard(replace(TRANSFER, first_recent_page=recent))
    pages = [(page, page + 2) for page in range(10, 16, 2)]
    order = [((layer, layer + 2), block) for layer in (0, 2) for block in pages for _ in range(2)]
    random.shuffle(order)
    seen, cells = [], set()
    wanted = {(0, layer, page) for layer in range(4) for page in range(10, 16)}
    wanted |= {(1, layer, page) for layer in range(4) for page in range(10, 16) if page >= recent}
    for sequence, (layers, block) in enumerate(order):
        stage = seen.count((layers, block))
        land(guard, frame(sequence, stage, layers, block))
        seen.append((layers, block))
        cells |= {(stage, layer, page) for layer in range(*layers) for page in range(*block)}
        assert guard.coarse_complete() == (wanted <= cells)
    assert guard.coarse_complete() and guard.complete()


def test_a_head_that_never_came_is_missing():
    guard = FrameGuard(TRANSFER)
    for stage in range(2):
        land(guard, frame(stage, stage, heads=(1, 2)))
    assert guard.missing() == 2 * 4 * 6 and not guard.complete() and not guard.coarse_complete()
