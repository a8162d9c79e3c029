"""The draw of kvrail.engine.sampling.draw as one Triton kernel: one launch for any mix of rows.

Several programs share a row. Each keeps its tokens in registers, and they meet whenever all need a number of the whole
row: its maximum, and the amounts within three depths in each step of a search for a filter's threshold. All of them are
sums of integers, so how a row is shared out changes no bit.

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
BLOCK = 4096
"""Tokens of a program: it keeps sixteen of them in each thread's registers."""
M1, M2, M3 = tl.constexpr(MULTIPLIER_1), tl.constexpr(MULTIPLIER_2), tl.constexpr(MULTIPLIER_3)


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
def _within(bits, limit, amounts):
    """The amount of this program's tokens that are no deeper; int64."""
    return tl.sum(tl.where(bits <= limit, amounts, 0)).to(tl.int64)


@triton.jit
def _shallowest(
    bits,
    amounts,
    needed,
    total,
    limit,
    cells,
    arrived,
    meetings,
    chunk,
    chunks,
    LEAST: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Smallest depth, as bits, within which the needed amount lies; non-negative floats order as their bits.

    total: the amount within `limit`. The search ends where no more than LEAST lies between its bounds. Returns how
    often the row's programs have met, too; meetings: before.
    """
    low, high = limit * 0, limit
    below, within = total * 0, total
    while (low < high) & (within - below > LEAST):
        step = (high - low) // 4 + 1
        first, second, third = _sums_of_row(
            _within(bits, tl.minimum(low + step - 1, high), amounts),
            _within(bits, tl.minimum(low + 2 * step - 1, high), amounts),
            _within(bits, tl.minimum(low + 3 * step - 1, high), amounts),
            cells, arrived, meetings, chunk, chunks, CHUNKS,
        )  # fmt: skip
        meetings += 1
        part = (first < needed).to(tl.int32) + (second < needed).to(tl.int32) + (third < needed).to(tl.int32)
        below = tl.where(part == 0, below, tl.where(part == 1, first, tl.where(part == 2, second, third)))
        within = tl.where(part == 0, first, tl.where(part == 1, second, tl.where(part == 2, third, within)))
        low = low + part * step
        high = tl.minimum(low + step - 1, high)
    return high, meetings


@triton.jit(do_not_specialize=["vocab_size", "chunks"])
def _draw_kernel(
    logits,
    row_words,
    out,
    peaks,
    cells,
    best_scores,
    best_ids,
    counters,
    stride,
    vocab_size,
    chunks,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draw a token from each row. Grid: (rows * chunks,).

    logits float32 [rows, V]; row_words int32 [rows, 6]; out int64 [rows]. Of `chunks` programs, at most CHUNKS, each
    has BLOCK tokens of a row. counters: int32 [1 + rows], zeros. The others hold what programs of a row tell another:
    peaks, best_scores float32 and best_ids int32 [rows, chunks]; cells int64 [rows, 2, chunks, 3].
    """
    ticket = tl.atomic_add(counters, 1)
    index, chunk = (ticket // chunks).to(tl.int64), ticket % chunks
    arrived, meetings = counters + 1 + index, chunks // chunks
    words = row_words + index * PARAMS
    k0 = tl.load(words).to(tl.uint32, bitcast=True)
    k1 = tl.load(words + 1).to(tl.uint32, bitcast=True)
    temperature = tl.load(words + 2).to(tl.float32, bitcast=True)
    limit = tl.load(words + 3)
    top_k = tl.load(words + 4)
    top_p = tl.load(words + 5).to(tl.float32, bitcast=True)
    random = temperature > 0.0
    temperature = tl.where(random, temperature, 1.0)

    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + index * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    broken = tl.max(tl.where(values != values, 1, 0))
    each = tl.arange(0, CHUNKS)
    of_row = index * chunks + each
    tl.store(peaks + index * chunks + chunk, tl.where(broken == 0, tl.max(values), float("inf")))
    _meet(arrived, chunks)
    peak = tl.max(tl.load(peaks + of_row, each < chunks, other=float("-inf"), cache_modifier=".cg"))
    sound = tl.abs(peak) < float("inf")
    peak = tl.where(sound, peak, 0.0)
    depth = tl.abs(tl.math.div_rn(peak - values, temperature))
    bits = tl.where(ids < vocab_size, depth.to(tl.int32, bitcast=True), OUTSIDE)

    cells += index * 6 * chunks
    if random & sound:
        if (top_k > 0) & (top_k < vocab_size):
            needed, total = top_k.to(tl.int64), vocab_size.to(tl.int64)
            ones, deepest = tl.full((BLOCK,), 1, tl.int32), limit * 0 + INFINITE_DEPTH
            kth, meetings = _shallowest(
                bits, ones, needed, total, deepest, cells, arrived, meetings, chunk, chunks, 1, CHUNKS
            )
            limit = tl.minimum(limit, kth)
        if top_p < 1.0:
            mass = (tl.exp(-depth) * MASS).to(tl.int64)
            held = _within(bits, limit, mass)
            total, _, _ = _sums_of_row(held, held, held, cells, arrived, meetings, chunk, chunks, CHUNKS)
            needed = tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
            limit, meetings = _shallowest(
                bits, mass, needed, total, limit, cells, arrived, meetings + 1, chunk, chunks, 0, CHUNKS
            )

    noise = tl.where(random, _gumbel(ids, k0, k1), 0.0)
    score = tl.where(bits <= limit, noise - depth, float("-inf"))
    best = tl.max(score)
    tl.store(best_scores + index * chunks + chunk, best)
    tl.store(best_ids + index * chunks + chunk, tl.min(tl.where(score == best, ids, OUTSIDE)))
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == (meetings + 1) * chunks - 1:  # the last one
        scores = tl.load(best_scores + of_row, each < chunks, other=float("-inf"), cache_modifier=".cg")
        found = tl.load(best_ids + of_row, each < chunks, other=OUTSIDE, cache_modifier=".cg")
        winner = tl.min(tl.where(scores == tl.max(scores), found, OUTSIDE))
        tl.store(out + index, tl.where(sound, winner, NONE).to(tl.int64))


def begin_draw(logits: Tensor, params: Sequence[DrawParams], block: int = BLOCK) -> Tensor:
    """Enqueue the draw of one token id from each row of `logits`, float32 [R, V]: int64 [R] on the device.

    The same ids as draw_on_cpu up to float rounding. block: see `launch_draw`.
    """
    words = draw_words(params)
    out = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    (uploaded,) = upload([words], logits.device) if logits.is_cuda else (torch.from_numpy(words),)
    launch_draw(logits, uploaded, out, block)
    return out


def launch_draw(logits: Tensor, words: Tensor, out: Tensor, block: int = BLOCK) -> None:
    """Enqueue the draw of one token id from each row of `logits`, float32 [R, V], into `out`, int64 [R].

    words: int32 [R, WORDS] on the same device, of draw.draw_words. block: tokens of a program, a power of two; Triton's
    interpreter runs one program after the other, so there it has to hold a whole row.
    """
    (rows, vocab_size), device = logits.shape, logits.device
    chunks = -(-vocab_size // block)
    peaks, best_scores = torch.empty(2, rows, chunks, device=device)
    best_ids = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    cells = torch.empty(rows, 2, chunks, 3, dtype=torch.int64, device=device)
    counters = torch.zeros(1 + rows, dtype=torch.int32, device=device)
    _draw_kernel[(rows * chunks,)](
        logits,
        words,
        out,
        peaks,
        cells,
        best_scores,
        best_ids,
        counters,
        logits.stride(0),
        vocab_size,
        chunks,
        BLOCK=block,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=max(1, block // 512),
    )
