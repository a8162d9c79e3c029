"""Which programs share which sequences: each token once, no more programs than there is room for, an even load."""

import heapq
import random

import numpy as np
import pytest

from kvrail.engine.attention.shares import room_for, shares_of


def seconds(lengths: list[int], shares: list[list[int]], kv_heads: int, slots: int) -> float:
    """When the last of all programs ends, each beginning in the slot that is free first; a token takes a second."""
    free = [0.0] * slots
    for row, _, count in shares:
        for _ in range(kv_heads if row >= 0 else 0):
            heapq.heapreplace(free, free[0] + lengths[row] / count)
    return max(free)


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("slots", [1, 132, 396, 528])
def test_each_row_is_there_once(kv_heads: int, slots: int) -> None:
    draw = random.Random(slots + kv_heads)
    for rows in (1, 2, 4, 5, 31, 64, 256):
        for longest in (1, 300, 40_000):
            lengths = [draw.choice([0, 1, longest, draw.randint(1, longest)]) for _ in range(rows)]
            shares = shares_of(np.array(lengths), kv_heads, slots).tolist()
            assert len(shares) == room_for(rows, kv_heads)
            named = [tuple(each) for each in shares if each[0] >= 0]
            counts = {row: count for row, _, count in named}
            assert sorted(counts) == list(range(rows))
            assert sorted(named) == [(row, n, count) for row, count in sorted(counts.items()) for n in range(count)]
            assert shares[len(named) :] == [[-1, -1, -1]] * (len(shares) - len(named))
            tokens = [lengths[row] / count for row, _, count in named]
            assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([2048] * 64, [1] * 64),  # all fit at once
        ([2048] * 80, [1] * 66 + [4] * 14),  # 66 do, and leave 528 slots to 14
        ([8192] * 32, [2] * 32),
        ([32_768] * 8, [8] * 8),
        ([128] * 8, [1] * 8),  # too short
    ],
)
def test_sequences_of_one_length(lengths: list[int], counts: list[int]) -> None:
    shares = shares_of(np.array(lengths), 8, 528)
    assert dict(shares[shares[:, 0] >= 0][:, [0, 2]].tolist()) == dict(enumerate(counts))


def test_all_slots_end_at_about_the_same_time() -> None:
    draw = random.Random(1)
    for rows, mean in ((16, 8000), (32, 4000), (64, 2000), (128, 2000), (200, 700)):
        for kind in (lambda: draw.uniform(0.05, 1.95), lambda: draw.lognormvariate(-0.6, 1.1)):
            lengths = [max(1, round(mean * kind())) for _ in range(rows)]
            for slots in (396, 528):
                found = seconds(lengths, shares_of(np.array(lengths), 8, slots).tolist(), 8, slots)
                assert found <= 1.5 * max(sum(lengths) * 8 / slots, 256)
