"""Paged attention for a CPU: read KV where it lies, in the element type that pages keep, and compute in float32.

A unit of work is one KV head and some tokens of one sequence, and its rows are these tokens' queries for that head. The
unit goes through the sequence's tokens by blocks of KEYS, counted from the sequence's beginning, and keeps for each
row the sum of weighted values, the sum of weights and the largest score so far (online softmax: Milakov and
Gimelshein, arXiv 1805.02867). A block's keys and values are widened once for all rows.

A row's result does not depend on the other rows of its unit, bit for bit: each of its scores and outputs is one chain
of fused multiply-adds in a fixed order, whichever product function computes it.
"""

# What numba compiles has no types that mypy can follow.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, misc"

import math

import numpy as np
from numba import float32, int32, int64, njit, types, uint8, void

from kvrail.codec.core.cpu_compile import compiled
from kvrail.engine.attention.cpu_kernel_vectors import (
    BFLOAT16,
    E4M3,
    FLOAT16,
    FLOAT32,
    LANES,
    ROWS,
    WIDE,
    add_product_narrow,
    add_product_wide,
    add_products_narrow,
    add_products_wide,
    prefetch,
    transpose,
    widen_bfloat16,
    widen_e4m3,
    widen_e5m2,
    widen_float16,
    widen_float32,
)
from kvrail.engine.kv.fixed import cpu_kernels as fixed_kernels
from kvrail.engine.kv.kvcomp import cpu_kernels as kvcomp_kernels
from kvrail.engine.kv.kvcomp import form as kvcomp_form
from kvrail.engine.kv.lossless.cpu_kernels import open_high, pair_at
from kvrail.engine.kv.rotated import cpu_kernels as rotated_kernels
from kvrail.engine.kv.rotated import form as rotated_form

KEYS = 64
"""Tokens of a block."""
_CODED = kvcomp_form.CODED
_ROTATED, _KEY_BITS = rotated_form.ROTATED, rotated_form.KEY_BITS
_LINE = 64
"""Bytes of a cache line."""
_LOG2_E, _LN2_UPPER, _LN2_LOWER = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST_EXPONENT = np.float32(-87.0)
_ZERO, _ONE, _HALF, _NEVER = np.float32(0), np.float32(1), np.float32(0.5), np.float32(-np.inf)
_POLYNOMIAL = tuple(
    map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1))
)


@njit(nogil=True)
def _multiply(a, a_at, a_row, b, b_step, c, c_at, c_row, rows, columns, count):
    """Add the product of a [rows, count] and b [count, columns] to c; columns is a multiple of LANES."""
    row = 0
    while row < rows:
        many = rows - row >= ROWS
        left, to = a_at + row * a_row, c_at + row * c_row
        column = 0
        while column < columns:
            if columns - column >= WIDE:
                if many:
                    add_products_wide(a, left, a_row, b, column, b_step, c, to + column, c_row, count)
                else:
                    add_product_wide(a, left, a_row, b, column, b_step, c, to + column, c_row, count)
                column += WIDE
            else:
                if many:
                    add_products_narrow(a, left, a_row, b, column, b_step, c, to + column, c_row, count)
                else:
                    add_product_narrow(a, left, a_row, b, column, b_step, c, to + column, c_row, count)
                column += LANES
        row += ROWS if many else 1


@njit(nogil=True)
def _widen(kind, pool, byte, out, at, scale):
    if kind == BFLOAT16:
        widen_bfloat16(pool, byte, out, at, scale)
    elif kind == FLOAT16:
        widen_float16(pool, byte, out, at, scale)
    elif kind == FLOAT32:
        widen_float32(pool, byte, out, at, scale)
    elif kind == E4M3:
        widen_e4m3(pool, byte, out, at, scale)
    else:
        widen_e5m2(pool, byte, out, at, scale)


@njit(nogil=True)
def _widen_block(kind, item_bytes, pool, scales, rows, dim, out, padded, narrow):
    """out[i * padded : i * padded + dim] = the pool's row number rows[i], for each of the block's tokens.

    narrow: uint8, scratch for one vector of elements, for rows shorter than a vector.
    """
    for i in range(KEYS):
        scale = scales[rows[i]] if len(scales) else _ONE
        begin, at = rows[i] * dim * item_bytes, i * padded
        if dim < LANES:
            for byte in range(dim * item_bytes):
                narrow[byte] = pool[begin + byte]
            _widen(kind, narrow, 0, out, at, scale)
        else:
            for column in range(0, dim - LANES + 1, LANES):
                _widen(kind, pool, begin + column * item_bytes, out, at + column, scale)
            if dim % LANES:
                last = dim - LANES
                _widen(kind, pool, begin + last * item_bytes, out, at + last, scale)


@njit(nogil=True)
def _open_tile(closed, begin, dim, order, channels, out):
    """out[i * dim : i * dim + dim] = the rows of a closed tile, for each of the block's tokens."""
    pages, spare, unit_bytes = closed[:3]
    bases, high, bits = np.empty(dim, np.uint8), np.empty(KEYS * dim, np.uint8), out.view(np.uint32)
    open_high(pages, begin, dim, order, channels, spare, unit_bytes, bases, high)
    for place in range(KEYS * dim):
        bits[order[place]] = (np.uint32(high[place]) << np.uint32(8) | np.uint32(pages[begin + place])) << np.uint32(16)


@njit(nogil=True)
def _open_block(closed, page, head, block, page_size, kv_heads, key_dim, value_dim, block_keys, block_values):
    """A block's keys and values, of a closed page; see attend_units for `closed`."""
    key_bytes, value_bytes = closed[3], closed[4]
    number, blocks = block % page_size // KEYS, page_size // KEYS
    begin = pair_at(page, head, number, kv_heads, blocks, key_bytes + value_bytes)
    if closed[9] == _CODED:
        kvcomp_kernels.open_tile(closed[0], begin, key_dim, True, closed[1], closed[5], closed[6], block_keys)
        begin += key_bytes
        kvcomp_kernels.open_tile(closed[0], begin, value_dim, False, closed[1], closed[7], closed[8], block_values)
    elif closed[9] == _ROTATED:
        fixed_kernels.open_tile(closed[0], begin, key_dim, True, _KEY_BITS, closed[5], closed[6], block_keys)
        rotated_kernels.open_tile(closed[0], begin + key_bytes, value_dim, closed[7], closed[8], block_values)
    elif closed[9]:
        fixed_kernels.open_tile(closed[0], begin, key_dim, True, closed[9], closed[5], closed[6], block_keys)
        begin += key_bytes
        fixed_kernels.open_tile(closed[0], begin, value_dim, False, closed[9], closed[7], closed[8], block_values)
    else:
        _open_tile(closed, begin, key_dim, closed[5], closed[6], block_keys)
        _open_tile(closed, begin + key_bytes, value_dim, closed[7], closed[8], block_values)


@njit(nogil=True)
def _prefetch_rows(pool, rows, row_bytes):
    for row in rows:
        for byte in range(0, row_bytes, _LINE):
            prefetch(pool, row * row_bytes + byte)


@njit(nogil=True)
def _find_rows(table, page_size, kv_heads, head, block, tokens, rows):
    """The pool's row of each token of a block. Behind the sequence's end may lie NaN: there it is the last token's."""
    page, offset = block // page_size, block % page_size
    for i in range(KEYS):
        rows[i] = (table[page] * page_size + offset) * kv_heads + head
        if block + i + 1 < tokens:
            offset += 1
            if offset == page_size:
                page, offset = page + 1, 0


@njit(nogil=True, fastmath={"contract", "reassoc", "nsz"})
def _sum(values):
    """The sum of KEYS floats."""
    total = _ZERO
    for i in range(KEYS):
        total += values[i]
    return total


@njit(nogil=True, fastmath={"contract", "reassoc", "nsz", "nnan", "ninf"})
def _largest(values):
    """The largest of KEYS floats."""
    largest = values[0]
    for i in range(KEYS):
        largest = max(largest, values[i])
    return largest


@njit(nogil=True, fastmath={"contract"})
def _exponentials(scores, largest, bits, powers):
    """scores[i] = exp(scores[i] - largest), at most 1, within two units in the last place.

    bits, powers: int32 and float32 views of one buffer. By Cephes' expf (Moshier): 2^n times a polynomial.
    """
    for i in range(len(scores)):
        x = scores[i] - largest
        x = _LEAST_EXPONENT if x < _LEAST_EXPONENT else x  # NaN stays
        n = np.floor(x * _LOG2_E + _HALF)
        r = x - n * _LN2_UPPER - n * _LN2_LOWER
        y = _POLYNOMIAL[0]
        y = y * r + _POLYNOMIAL[1]
        y = y * r + _POLYNOMIAL[2]
        y = y * r + _POLYNOMIAL[3]
        y = y * r + _POLYNOMIAL[4]
        y = y * r + _HALF
        scores[i] = y * r * r + r + _ONE
        bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for i in range(len(scores)):
        scores[i] *= powers[i]


@njit(nogil=True)
def _weigh(scores, seen_from, seen_to, softcap, largest, bits, powers):
    """Scores of one row become weights, 0 outside seen_from to seen_to; returns the new largest score.

    largest: the largest score of the blocks before.
    """
    if softcap > 0:
        for i in range(seen_from, seen_to):
            scores[i] = softcap * np.float32(math.tanh(scores[i] / softcap))
    scores[:seen_from] = _NEVER
    scores[seen_to:] = _NEVER
    largest = max(largest, _largest(scores))
    _exponentials(scores, largest, bits, powers)
    scores[:seen_from] = _ZERO
    scores[seen_to:] = _ZERO
    return largest


@njit(nogil=True)
def _weigh_rows(weights, skipped, group, before, block, window, softcap, largest, totals, sums, width, bits, powers):
    """Scores of a block become weights; the sums of earlier blocks are rescaled to the new largest score."""
    for row in range(skipped, len(largest)):
        row_weights = weights[row * KEYS : row * KEYS + KEYS]
        seen_to = min(KEYS, before + row // group + 1 - block)
        seen_from = max(0, before + row // group + 1 - window - block) if window else 0
        if seen_from >= seen_to:  # the window begins in a later block
            row_weights[:] = _ZERO
            continue
        top = _weigh(row_weights, seen_from, seen_to, softcap, largest[row], bits, powers)
        fade = np.float32(math.exp(largest[row] - top))
        largest[row] = top
        totals[row] = totals[row] * fade + _sum(row_weights)
        for i in range(row * width, (row + 1) * width):
            sums[i] *= fade


@njit(nogil=True)
def _scaled_queries(query, begin, head, group, scale, sinks, queries, totals, largest):
    """The queries of a unit's rows, and what their sums begin with."""
    key_dim = query.shape[2]
    for row in range(len(totals)):
        for d in range(key_dim):
            queries[row * key_dim + d] = scale * query[begin + row // group, head * group + row % group, d]
        if len(sinks):
            totals[row], largest[row] = _ONE, sinks[head * group + row % group]


@njit(nogil=True)
def _attend_unit(
    query, out, begin, end, before, head, table, keys, values, key_scales, value_scales, kind, item_bytes,
    page_size, kv_heads, scale, window, softcap, sinks, closed_tokens, closed,
):  # fmt: skip
    """Tokens begin to end of `query`, whose sequence has `before` tokens before them."""
    key_dim, value_dim, group = query.shape[2], out.shape[2], query.shape[1] // kv_heads
    key_width, value_width = -(-key_dim // LANES) * LANES, -(-value_dim // LANES) * LANES
    count, tokens = (end - begin) * group, before + end - begin
    queries, sums = np.empty(count * key_dim, np.float32), np.zeros(count * value_width, np.float32)
    totals, largest = np.zeros(count, np.float32), np.full(count, _NEVER, np.float32)
    _scaled_queries(query, begin, head, group, scale, sinks, queries, totals, largest)
    block_keys, block_values = np.zeros(KEYS * key_width, np.float32), np.zeros(KEYS * value_width, np.float32)
    columns, weights = np.empty(key_width * KEYS, np.float32), np.empty(count * KEYS, np.float32)
    bits, narrow = np.empty(KEYS, np.int32), np.zeros(4 * LANES, np.uint8)
    rows, next_rows = np.empty(KEYS, np.int64), np.empty(KEYS, np.int64)
    lead, first = closed[10], max(0, before + 1 - window) // KEYS * KEYS if window else 0
    _find_rows(table, page_size, kv_heads, head, first, tokens, next_rows)
    for block in range(first, tokens, KEYS):
        rows, next_rows = next_rows, rows
        following = block + KEYS
        if following < tokens and not lead <= following < closed_tokens:
            _find_rows(table, page_size, kv_heads, head, following, tokens, next_rows)
            _prefetch_rows(keys, next_rows, key_dim * item_bytes)
            _prefetch_rows(values, next_rows, value_dim * item_bytes)
        if lead <= block < closed_tokens:
            page = table[block // page_size]
            _open_block(closed, page, head, block, page_size, kv_heads, key_dim, value_dim, block_keys, block_values)
        else:
            _widen_block(kind, item_bytes, keys, key_scales, rows, key_dim, block_keys, key_width, narrow)
            _widen_block(kind, item_bytes, values, value_scales, rows, value_dim, block_values, value_width, narrow)
        for i in range(0, KEYS, LANES):
            for d in range(0, key_width, LANES):
                transpose(block_keys, i * key_width + d, key_width, columns, d * KEYS + i, KEYS)
        skipped = max(0, block - before) * group  # rows of tokens before the block
        weights[skipped * KEYS :] = _ZERO
        _multiply(
            queries, skipped * key_dim, key_dim, columns, KEYS, weights, skipped * KEYS, KEYS,
            count - skipped, KEYS, key_dim,
        )  # fmt: skip
        _weigh_rows(
            weights, skipped, group, before, block, window, softcap, largest, totals, sums, value_width,
            bits, bits.view(np.float32),
        )  # fmt: skip
        _multiply(
            weights, skipped * KEYS, KEYS, block_values, value_width, sums, skipped * value_width, value_width,
            count - skipped, value_width, KEYS,
        )  # fmt: skip
    for row in range(count):
        for d in range(value_dim):
            out[begin + row // group, head * group + row % group, d] = sums[row * value_width + d] / totals[row]


_bytes, _scales, _orders = (types.Array(kind, 1, "C") for kind in (uint8, float32, int32))


@compiled(
    void(
        types.Array(int64, 2, "C"), types.Array(float32, 3, "C"), types.Array(float32, 3, "C"),
        types.Array(int32, 2, "C"), _bytes, _bytes, _scales, _scales, int64, int64, int64, int64,
        float32, int64, float32, _scales, types.Array(int64, 1, "C"),
        types.Tuple([_bytes, _bytes, int64, int64, int64, _orders, _orders, _orders, _orders, int64, int64]),
    )
)  # fmt: skip
def attend_units(
    units, query, out, page_tables, keys, values, key_scales, value_scales, kind, item_bytes, page_size, kv_heads,
    scale, window, softcap, sinks, closed_tokens, closed,
):  # fmt: skip
    """Attend each unit's tokens to their own sequences' pages.

    units: [units, 5], a row each: sequence, KV head, first and last + 1 of its tokens in the step, and how many
    tokens its sequence has before these. query: [tokens, heads, key_dim]; out: [tokens, heads, value_dim];
    page_tables: [sequences, width]; keys, values: one layer's pool, its bytes; key_scales, value_scales: flat,
    empty where elements have none; kind, item_bytes: of elements; window, softcap: 0 is off; sinks: [heads] or
    empty. closed_tokens: [sequences], see StepMeta. closed: of one layer's closed pages their bytes, the spare
    units or tables of codes, bytes of a unit and of both tiles, then the places of values and bases, or rows, of
    both, then the bits of a value of fixed width, or 0 in lossless pages, and how many tokens before them are open.
    """
    for unit in range(len(units)):
        sequence, head, begin, end, before = units[unit]
        _attend_unit(
            query, out, begin, end, before, head, page_tables[sequence], keys, values, key_scales, value_scales,
            kind, item_bytes, page_size, kv_heads, scale, window, softcap, sinks, closed_tokens[sequence], closed,
        )  # fmt: skip
