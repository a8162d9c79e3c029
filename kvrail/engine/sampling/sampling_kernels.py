"""The draw of kvrail.engine.sampling.draw as one Triton kernel: one launch, one copy each way, for any mix of rows."""

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
V_LIMIT = tl.constexpr(LARGEST_V)
NONE = tl.constexpr(NOT_DRAWN)
M1, M2, M3 = tl.constexpr(MULTIPLIER_1), tl.constexpr(MULTIPLIER_2), tl.constexpr(MULTIPLIER_3)


@triton.jit
def _depths(row, start, vocab_size, peak, temperature, BLOCK: tl.constexpr):
    """Ids and depths (-score, never negative) of one block; int32 [BLOCK], float32 [BLOCK]; +inf past the end."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
    return ids, tl.abs(tl.math.div_rn(peak - logits, temperature))


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
def _amount_within(
    row, depth_bits, limit_bits, vocab_size, peak, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Number, or integer mass, of the tokens no deeper than both bounds; int64."""
    total = tl.zeros((BLOCK,), tl.int64)
    bound = tl.minimum(depth_bits, limit_bits)
    for start in range(0, vocab_size, BLOCK):
        ids, depth = _depths(row, start, vocab_size, peak, temperature, BLOCK)
        inside = (depth.to(tl.int32, bitcast=True) <= bound) & (ids < vocab_size)
        amount = (tl.exp(-depth) * MASS).to(tl.int64) if BY_MASS else tl.full((BLOCK,), 1, tl.int64)
        total += tl.where(inside, amount, 0)
    return tl.sum(total)


@triton.jit
def _shallowest(row, needed, limit_bits, vocab_size, peak, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Smallest depth, as bits, within which the needed number or mass lies; non-negative floats order as their bits."""
    low = 0
    high = limit_bits
    while low < high:
        middle = low + (high - low) // 2
        if _amount_within(row, middle, limit_bits, vocab_size, peak, temperature, BY_MASS, BLOCK) >= needed:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _draw_kernel(logits, row_words, out, stride, vocab_size, BLOCK: tl.constexpr):
    """Draw one token a program: grid (R,). logits float32 [R, V]; row_words int32 [R, 6]; out int64 [R]."""
    row = logits + tl.program_id(0).to(tl.int64) * stride
    words = row_words + tl.program_id(0) * PARAMS
    k0 = tl.load(words).to(tl.uint32, bitcast=True)
    k1 = tl.load(words + 1).to(tl.uint32, bitcast=True)
    temperature = tl.load(words + 2).to(tl.float32, bitcast=True)
    limit = tl.load(words + 3)
    top_k = tl.load(words + 4)
    top_p = tl.load(words + 5).to(tl.float32, bitcast=True)
    random = temperature > 0.0
    temperature = tl.where(random, temperature, 1.0)

    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        peaks = tl.maximum(peaks, values)
        broken = tl.where(values != values, 1, broken)
    peak = tl.max(peaks)
    sound = (tl.max(broken) == 0) & (tl.abs(peak) < float("inf"))
    peak = tl.where(sound, peak, 0.0)

    if random:
        if top_k > 0 and top_k < vocab_size:
            kth = _shallowest(row, top_k.to(tl.int64), INFINITE_DEPTH, vocab_size, peak, temperature, False, BLOCK)
            limit = tl.minimum(limit, kth)
        if top_p < 1.0:
            total = _amount_within(row, limit, limit, vocab_size, peak, temperature, True, BLOCK)
            needed = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
            limit = _shallowest(row, tl.maximum(needed, 1), limit, vocab_size, peak, temperature, True, BLOCK)

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids, depth = _depths(row, start, vocab_size, peak, temperature, BLOCK)
        kept = (depth.to(tl.int32, bitcast=True) <= limit) & (ids < vocab_size)
        noise = tl.where(random, _gumbel(ids, k0, k1), 0.0)
        score = tl.where(kept, noise - depth, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_ids = tl.where(better, ids, best_ids)
    winner = tl.min(tl.where(best == tl.max(best), best_ids, 0x7FFFFFFF))
    tl.store(out + tl.program_id(0), tl.where(sound, winner, NONE).to(tl.int64))


def begin_draw(logits: Tensor, params: Sequence[DrawParams], block: int = 16384) -> Tensor:
    """Enqueue the draw of one token id from each row of `logits`, float32 [R, V]: int64 [R] on the device.

    The same ids as draw_on_cpu up to float rounding.
    """
    words = draw_words(params)
    out = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    (uploaded,) = upload([words], logits.device) if logits.is_cuda else (torch.from_numpy(words),)
    launch_draw(logits, uploaded, out, block)
    return out


def launch_draw(logits: Tensor, words: Tensor, out: Tensor, block: int = 16384) -> None:
    """Enqueue the draw of one token id from each row of `logits`, float32 [R, V], into `out`, int64 [R].

    words: int32 [R, WORDS] on the same device, of draw.draw_words.
    """
    _draw_kernel[(len(out),)](
        logits, words, out, logits.stride(0), logits.shape[1], BLOCK=block, num_warps=max(1, block // 1024)
    )
