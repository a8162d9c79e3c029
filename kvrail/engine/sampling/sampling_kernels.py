"""The draw of kvrail.engine.sampling.draw as one Triton kernel: one launch for any mix of rows.

Where rows are few, several programs share each. They meet whenever all need a number of the whole row: its maximum, and
the amounts within three depths in each step of a search for a filter's threshold. All of them are sums of integers, so
how a row is shared out changes no bit. What few tokens top_k has left is sorted instead.

A program takes its place in a row when it begins to run. So of the programs that wait, those of one row at most wait
for some that have not begun, and these begin as soon as others end.
"""

# Triton reads a kernel's parameters as tensors; it takes no other annotation of them.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrail.engine.batch.batch import NOT_DRAWN
from kvrail.engine.batch.inputs import upload
from kvrail.engine.sampling.draw import MASS_SCALE, WORDS, DrawParams, draw_words
from kvrail.engine.sampling.noise import LARGEST_V, MULTIPLIER_1, MULTIPLIER_2, MULTIPLIER_3

PARAMS = tl.constexpr(WORDS)  # a row: see draw.draw_words
INFINITE_DEPTH = tl.constexpr(0x7F800000)  # bits of +inf
MASS = tl.constexpr(MASS_SCALE)
OUTSIDE = tl.constexpr(0x7FFFFFFF)  # deeper than any limit; as a token id, behind all others
V_LIMIT = tl.constexpr(LARGEST_V)
NONE = tl.constexpr(NOT_DRAWN)
M1, M2, M3 = tl.constexpr(MULTIPLIER_1), tl.constexpr(MULTIPLIER_2), tl.constexpr(MULTIPLIER_3)
BLOCK, WARPS = 2048, 8
"""Tokens that a program takes at once, and its warps."""
PROGRAMS = 264
"""Programs among which rows are shared out: two for each processor of an H100."""
FEW = 128
"""Most tokens that are sorted."""


@triton.jit
def _depths(row, start, end, peak, temperature, BLOCK: tl.constexpr):
    """Ids, depths (-score, never negative) and their bits of tokens from `start` on: int32, float32, int32 [BLOCK]."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row + ids, mask=ids < end, other=float("-inf"))
    depth = tl.abs(tl.math.div_rn(peak - logits, temperature))
    return ids, depth, tl.where(ids < end, depth.to(tl.int32, bitcast=True), OUTSIDE)


@triton.jit
def _gumbel(ids, k0, k1):
    """Return the noise of kvrail.engine.sampling.noise for int32 ids [BLOCK]; float32 [BLOCK]."""
    x = ids.to(tl.uint32) + k0
    x ^= x >> 17
    x *= M1
    x ^= x >> 11
    x += k1
    x *= M2
    x ^= x >> 15
    x *= M3
    x ^= x >> 14
    v = ((x >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    v = tl.minimum(v, V_LIMIT)
    # log1p(-v) by Kahan's method: the rounding of 1 - v is divided out again.
    w = 1.0 - v
    rounded = tl.where(w == 1.0, 1.0, 1.0 - w)
    exponential = tl.where(w == 1.0, v, -tl.log(w) * v / rounded)
    return -tl.log(exponential)


@triton.jit
def _meet(arrived, target):
    """Wait for the other programs of a row. What they stored before can be loaded from L2 behind it."""
    tl.debug_barrier()  # all threads' stores come before the arrival that announces them
    tl.atomic_add(arrived, 1, sem="acq_rel")
    while tl.atomic_add(arrived, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()


@triton.jit
def _sums_of_row(first, second, third, cells, arrived, meetings, chunk, chunks, CHUNKS: tl.constexpr):
    """Three numbers of each of a row's programs, int64, summed up. cells: int64 [2, chunks, 3]; meetings: before."""
    cells += meetings % 2 * 3 * chunks  # those of the last meeting may still be read
    own = cells + 3 * chunk
    tl.store(own, first)
    tl.store(own + 1, second)
    tl.store(own + 2, third)
    _meet(arrived, (meetings + 1) * chunks)
    each = tl.arange(0, CHUNKS)
    at = cells + 3 * each
    first = tl.sum(tl.load(at, each < chunks, other=0, cache_modifier=".cg"))
    second = tl.sum(tl.load(at + 1, each < chunks, other=0, cache_modifier=".cg"))
    third = tl.sum(tl.load(at + 2, each < chunks, other=0, cache_modifier=".cg"))
    return first, second, third


@triton.jit
def _mass(depth):
    """Mass of tokens, int64."""
    return (tl.exp(-depth) * MASS).to(tl.int64)


@triton.jit
def _within(row, first, second, third, begin, end, peak, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Number, or integer mass, of this program's tokens that are no deeper than each of three bounds; int64."""
    kind: tl.constexpr = tl.int64 if BY_MASS else tl.int32
    sums = tl.zeros((BLOCK,), kind)
    seconds, thirds = sums, sums
    for start in range(begin, end, BLOCK):
        _, depth, bits = _depths(row, start, end, peak, temperature, BLOCK)
        amount = _mass(depth) if BY_MASS else tl.full((BLOCK,), 1, tl.int32)
        sums += tl.where(bits <= first, amount, 0)
        seconds += tl.where(bits <= second, amount, 0)
        thirds += tl.where(bits <= third, amount, 0)
    return tl.sum(sums).to(tl.int64), tl.sum(seconds).to(tl.int64), tl.sum(thirds).to(tl.int64)


@triton.jit
def _shallowest(
    row, needed, total, limit, begin, end, peak, temperature, cells, arrived, meetings, chunk, chunks,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Smallest depth, as bits, within which the needed amount lies; non-negative floats order as their bits.

    total: the amount within `limit`. Numbers are searched for until one token lies between the bounds. Returns the
    depth, the amount within it, and how often the row's programs have met; meetings: before.
    """
    low, high = limit * 0, limit
    below, within = total * 0, total
    while (low < high) & (BY_MASS | (within - below > 1)):
        step = (high - low) // 4 + 1
        first, second, third = _within(
            row, tl.minimum(low + step - 1, high), tl.minimum(low + 2 * step - 1, high),
            tl.minimum(low + 3 * step - 1, high), begin, end, peak, temperature, BY_MASS, BLOCK,
        )  # fmt: skip
        first, second, third = _sums_of_row(first, second, third, cells, arrived, meetings, chunk, chunks, CHUNKS)
        meetings += 1
        part = (first < needed).to(tl.int32) + (second < needed).to(tl.int32) + (third < needed).to(tl.int32)
        below = tl.where(part == 0, below, tl.where(part == 1, first, tl.where(part == 2, second, third)))
        within = tl.where(part == 0, first, tl.where(part == 1, second, tl.where(part == 2, third, within)))
        low = low + part * step
        high = tl.minimum(low + step - 1, high)
    return high, within, meetings


@triton.jit
def _gather(row, limit, few, count, begin, end, peak, temperature, BLOCK: tl.constexpr):
    """Put the depths, as bits, of this program's tokens that are no deeper than `limit` behind those in `few`.

    count: of those that are there.
    """
    for start in range(begin, end, BLOCK):
        _, _, bits = _depths(row, start, end, peak, temperature, BLOCK)
        kept = (bits <= limit).to(tl.int32)
        number = tl.sum(kept)
        if number > 0:
            at = tl.atomic_add(count, number, sem="relaxed") + tl.cumsum(kept) - 1
            tl.store(few + at, bits, kept > 0)


@triton.jit
def _needed(total, top_p):
    """The part of a mass that top_p keeps."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _peak(row, begin, end, BLOCK: tl.constexpr):
    """The largest logit of a program's tokens; +inf if one is NaN."""
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < end, other=float("-inf"))
        peaks = tl.maximum(peaks, values)
        broken = tl.where(values != values, 1, broken)
    return tl.where(tl.max(broken) == 0, tl.max(peaks), float("inf"))


@triton.jit
def _filtered(
    row, limit, top_k, top_p, vocab_size, begin, end, peak, temperature, cells, few, arrived, meetings, chunk, chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The depth, as bits, that top_k and top_p leave of `limit`, and how often the row's programs have met."""
    sorts = top_k < 0
    if (top_k > 0) & (top_k < vocab_size):
        kth, kept, meetings = _shallowest(
            row, top_k.to(tl.int64), vocab_size.to(tl.int64), limit * 0 + INFINITE_DEPTH, begin, end, peak, temperature,
            cells, arrived, meetings, chunk, chunks, False, BLOCK, CHUNKS,
        )  # fmt: skip
        limit, sorts = tl.minimum(limit, kth), kept <= FEW
    if (top_p < 1.0) & sorts:
        _gather(row, limit, few, arrived + 1, begin, end, peak, temperature, BLOCK)
        meetings += 1
        _meet(arrived, meetings * chunks)
        place, count = tl.arange(0, FEW), tl.load(arrived + 1, cache_modifier=".cg")
        bits = tl.sort(tl.load(few + place, place < count, other=INFINITE_DEPTH, cache_modifier=".cg"))
        mass = _mass(bits.to(tl.float32, bitcast=True))
        limit = tl.min(tl.where(tl.cumsum(mass) >= _needed(tl.sum(mass), top_p), bits, INFINITE_DEPTH))
    elif top_p < 1.0:
        held, _, _ = _within(row, limit, limit, limit, begin, end, peak, temperature, True, BLOCK)
        total, _, _ = _sums_of_row(held, held, held, cells, arrived, meetings, chunk, chunks, CHUNKS)
        limit, _, meetings = _shallowest(
            row, _needed(total, top_p), total, limit, begin, end, peak, temperature, cells, arrived, meetings + 1,
            chunk, chunks, True, BLOCK, CHUNKS,
        )  # fmt: skip
    return limit, meetings


@triton.jit(do_not_specialize=["vocab_size", "chunks", "size"])
def _draw_kernel(
    logits,
    row_words,
    out,
    numbers,
    scores,
    cells,
    counters,
    stride,
    vocab_size,
    chunks,
    size,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FEW: tl.constexpr,
):
    """Draw a token from each row. Grid: (rows * chunks,).

    logits float32 [rows, V]; row_words int32 [rows, 6]; out int64 [rows]. Of `chunks` programs, at most CHUNKS, each
    has `size` tokens of a row. counters: int32 [1 + 2 * rows], zeros. What programs of a row tell each other: numbers
    int32 [rows, chunks + FEW], scores float32 [rows, 2, chunks], cells int64 [rows, 2, chunks, 3].
    """
    ticket = tl.atomic_add(counters, 1)
    index, chunk = (ticket // chunks).to(tl.int64), ticket % chunks
    arrived, meetings = counters + 1 + 2 * index, chunks // chunks
    numbers += index * (chunks + FEW)
    scores += index * 2 * chunks
    words = row_words + index * PARAMS
    k0 = tl.load(words).to(tl.uint32, bitcast=True)
    k1 = tl.load(words + 1).to(tl.uint32, bitcast=True)
    temperature = tl.load(words + 2).to(tl.float32, bitcast=True)
    limit = tl.load(words + 3)
    top_k = tl.load(words + 4)
    top_p = tl.load(words + 5).to(tl.float32, bitcast=True)
    random = temperature > 0.0
    temperature = tl.where(random, temperature, 1.0)

    row, begin = logits + index * stride, chunk * size
    end = tl.minimum(begin + size, vocab_size)
    each = tl.arange(0, CHUNKS)
    tl.store(scores + chunk, _peak(row, begin, end, BLOCK))
    _meet(arrived, chunks)
    peak = tl.max(tl.load(scores + each, each < chunks, other=float("-inf"), cache_modifier=".cg"))
    sound = tl.abs(peak) < float("inf")
    peak = tl.where(sound, peak, 0.0)

    if random & sound:
        limit, meetings = _filtered(
            row, limit, top_k, top_p, vocab_size, begin, end, peak, temperature, cells + index * 6 * chunks,
            numbers + chunks, arrived, meetings, chunk, chunks, BLOCK, CHUNKS, FEW,
        )  # fmt: skip

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.full((BLOCK,), OUTSIDE, tl.int32)
    for start in range(begin, end, BLOCK):
        ids, depth, bits = _depths(row, start, end, peak, temperature, BLOCK)
        noise = tl.where(random, _gumbel(ids, k0, k1), 0.0)
        score = tl.where(bits <= limit, noise - depth, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_ids = tl.where(better, ids, best_ids)
    winner = tl.min(tl.where(best == tl.max(best), best_ids, OUTSIDE))
    scores += chunks  # behind the maxima, which others may still read
    tl.store(scores + chunk, tl.max(best))
    tl.store(numbers + chunk, winner)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == (meetings + 1) * chunks - 1:  # the last of the row
        found = tl.load(scores + each, each < chunks, other=float("-inf"), cache_modifier=".cg")
        names = tl.load(numbers + each, each < chunks, other=OUTSIDE, cache_modifier=".cg")
        winner = tl.min(tl.where(found == tl.max(found), names, OUTSIDE))
        tl.store(out + index, tl.where(sound, winner, NONE).to(tl.int64))


def begin_draw(logits: Tensor, params: Sequence[DrawParams], programs: int = PROGRAMS) -> Tensor:
    """Enqueue the draw of one token id from each row of `logits`, float32 [R, V]: int64 [R] on the device.

    The same ids as draw_on_cpu up to float rounding. programs: see `launch_draw`.
    """
    words = draw_words(params)
    out = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    (uploaded,) = upload([words], logits.device) if logits.is_cuda else (torch.from_numpy(words),)
    launch_draw(logits, uploaded, out, programs)
    return out


def launch_draw(logits: Tensor, words: Tensor, out: Tensor, programs: int = PROGRAMS) -> None:
    """Enqueue the draw of one token id from each row of `logits`, float32 [R, V], into `out`, int64 [R].

    words: int32 [R, WORDS] on the same device, of draw.draw_words. programs: among which the rows are shared out, one a
    row at least; in Triton's interpreter, which runs one after the other, a row cannot have more.
    """
    (rows, vocab_size), device = logits.shape, logits.device
    size = -(-vocab_size // max(1, programs // rows) // BLOCK) * BLOCK
    chunks = -(-vocab_size // size)
    numbers = torch.empty(rows, chunks + FEW, dtype=torch.int32, device=device)
    scores = torch.empty(rows, 2, chunks, device=device)
    cells = torch.empty(rows, 2, chunks, 3, dtype=torch.int64, device=device)
    counters = torch.zeros(1 + 2 * rows, dtype=torch.int32, device=device)
    _draw_kernel[(rows * chunks,)](
        logits,
        words,
        out,
        numbers,
        scores,
        cells,
        counters,
        logits.stride(0),
        vocab_size,
        chunks,
        size,
        BLOCK=BLOCK,
        CHUNKS=triton.next_power_of_2(chunks),
        FEW=FEW,
        num_warps=WARPS,
    )
