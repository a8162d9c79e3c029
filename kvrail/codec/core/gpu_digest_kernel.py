"""Triton kernel of the digest LANES; digest.py defines it."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core import digest

FIRST = tl.constexpr(digest.FIRST)
SECOND = tl.constexpr(digest.SECOND)
PLACE = tl.constexpr(digest.PLACE)


@triton.jit
def _mixed(words, places):
    """What words add to the sum; words, places: uint64, places from 1."""
    x = (words ^ (places * tl.full([], PLACE, tl.uint64))) * tl.full([], FIRST, tl.uint64)
    x = (x ^ (x >> 32)) * tl.full([], SECOND, tl.uint64)
    return x ^ (x >> 32)


@triton.jit(do_not_specialize=["num_words", "num_tail_bytes", "num_programs"])
def sum_words_kernel(words, tail, total, num_words, num_tail_bytes, num_programs, BLOCK: tl.constexpr):
    """Grid: `num_programs`. Adds the payload's sum to `total`, int64 [1], whatever that holds.

    words: int64 [num_words]; tail: uint8, the num_tail_bytes (0 to 7) behind them.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.uint64)
    for first in range(program * BLOCK, num_words, num_programs * BLOCK):
        where = first + lane
        real = where < num_words
        word = tl.load(words + where, mask=real, other=0).to(tl.uint64, bitcast=True)
        found += tl.where(real, _mixed(word, (where + 1).to(tl.uint64)), tl.full([], 0, tl.uint64))
    added = tl.sum(found.to(tl.int64, bitcast=True), axis=0)
    if (program == 0) & (num_tail_bytes > 0):
        byte = tl.arange(0, 8)
        left = tl.load(tail + byte, mask=byte < num_tail_bytes, other=0).to(tl.int64)
        word = tl.sum(left << (8 * byte).to(tl.int64), axis=0).to(tl.uint64, bitcast=True)
        added += _mixed(word, (num_words + 1).to(tl.uint64)).to(tl.int64, bitcast=True)
    tl.atomic_add(total, added, sem="relaxed")
