"""Attention over a block of a closed page: the values of a plain page, in the same order of sums."""

import triton
import triton.language as tl

from kvrail.engine.attention.triton.axes_kernel import along, dealt, dealt_numbers, product
from kvrail.engine.attention.triton.order_kernel import apart, end_block, seen_scores, weights_of
from kvrail.engine.kv.fixed.open_kernel import SHRUNK, open_tile
from kvrail.engine.kv.kvcomp import form
from kvrail.engine.kv.kvcomp.open_kernel import CODED, codes_of_pair, fetch_ahead, open_coded
from kvrail.engine.kv.lossless.open_kernel import open_keys, open_values
from kvrail.engine.kv.rotated.open_kernel import KEY_BITS, ROTATED, open_rotated


@triton.jit
def pair_of(
    closed_pages,
    table,
    block,
    kv_head,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BOTH_TILES: tl.constexpr,
):
    """Where the tiles of a block of a closed page begin."""
    page = tl.load(table + block // PAGE_SIZE).to(tl.int64)
    pair = (page * KV_HEADS + kv_head) * (PAGE_SIZE // BLOCK) + block % PAGE_SIZE // BLOCK
    return closed_pages + tl.multiple_of(pair * BOTH_TILES, 64)


@triton.constexpr_function
def stages_of(code_bits: int) -> int | None:
    """Pipeline stages of loops over closed blocks; None: the kernel's. Reading of streams cannot be pipelined."""
    return 1 if code_bits == form.CODED else None


@triton.constexpr_function
def open_stages_of(code_bits: int) -> int:
    """Pipeline stages of the decode kernel's loops over open blocks beside closed ones.

    They cost the loop over closed blocks registers, and shared memory where it takes less than 45 KiB.
    """
    return 1 if code_bits in (form.CODED, ROTATED.value) else 3


@triton.jit
def closed_codes_of(
    pair,
    spare,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):
    """The codes of a block's keys and of its values where streams have them; elsewhere two that nothing uses."""
    if CODE_BITS == CODED:
        keys, values = codes_of_pair(pair, spare, KEY_DIM, VALUE_DIM, BLOCK, KEY_TILE, ASSEMBLED)
    else:
        keys, values = pair, pair
    return keys, values


@triton.jit
def closed_scores_of(
    q,
    pair,
    codes,
    spare,
    unit_bytes,
    block,
    position,
    end,
    scale,
    softcap,
    KEY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ASSEMBLED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """What scores_of computes, of a block of a closed page.

    pair: see pair_of; codes: of keys, see closed_codes_of; spare: spare units, of unit_bytes.
    CODE_BITS: bits of a value of fixed width, or CODED or ROTATED, whose products are / SHRUNK, or 0 in lossless pages.
    In CODED pages `spare` is the tables of codes.
    """
    if CODE_BITS:
        if CODE_BITS == CODED:
            k = open_coded(pair, codes, KEY_DIM, BLOCK, ASSEMBLED)
        else:
            k = open_tile(pair, KEY_BITS if CODE_BITS == ROTATED else CODE_BITS, KEY_DIM, BLOCK, ASSEMBLED)
        tl.static_assert(q.dtype == tl.bfloat16, "others have no room for values / SHRUNK")
        scale *= SHRUNK
    else:
        k = open_keys(pair, spare, unit_bytes, KEY_DIM, ASSEMBLED)
    scores = product(q, apart(dealt(k, KEYS).to(q.dtype), ASSEMBLED), None, KEYS)
    token = block + dealt_numbers(BLOCK, not KEYS)
    return seen_scores(scores, token, position, end, scale, softcap, WINDOW, SOFTCAP, MASKED, KEYS)


@triton.jit
def add_closed_block(
    scores,
    pair,
    codes,
    spare,
    unit_bytes,
    part,
    scale,
    softcap,
    dtype: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASSEMBLED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """What add_block does, of a block of a closed page.

    codes: of values, see closed_codes_of; KEY_TILE: bytes of the keys before its values.
    """
    acc, top, total = part
    times: tl.constexpr = SHRUNK if CODE_BITS else 1.0  # scores and values are as much too small
    weights, shrink, higher, total = weights_of(
        scores, top, total, softcap if SOFTCAP else scale * times, dtype, BLOCK, KEYS, True, times
    )
    if CODE_BITS == CODED:
        v = open_coded(pair + KEY_TILE, codes, BLOCK, VALUE_DIM, ASSEMBLED)
    elif CODE_BITS == ROTATED:
        v = open_rotated(pair + KEY_TILE, VALUE_DIM, ASSEMBLED)
    elif CODE_BITS:
        v = open_tile(pair + KEY_TILE, CODE_BITS, BLOCK, VALUE_DIM, ASSEMBLED)
    else:
        v = open_values(pair + KEY_TILE, spare, unit_bytes, VALUE_DIM, ASSEMBLED)
    weighted = acc * along(shrink, 1 - KEYS)
    acc = product(weights.to(dtype), apart(dealt(v, KEYS).to(dtype), ASSEMBLED), weighted, KEYS)
    return acc, higher, total


@triton.jit
def add_closed_blocks(
    q,
    closed,
    table,
    kv_head,
    begin,
    opened,
    end,
    position,
    kv_len,
    scale,
    softcap,
    parts,
    folds,
    live,
    before,
    part,
    channels,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ASSEMBLED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The decode kernel's loop over a share's closed blocks, `begin` to `opened`. closed: see LayerPages."""
    closed_pages, spare, unit_bytes = closed
    for block in tl.range(begin, opened, BLOCK, num_stages=stages_of(CODE_BITS)):
        pair = pair_of(closed_pages, table, block, kv_head, KV_HEADS, PAGE_SIZE, BLOCK, BOTH_TILES)
        if CODE_BITS == CODED:
            after = tl.minimum(block + BLOCK, opened - BLOCK)
            fetch_ahead(pair_of(closed_pages, table, after, kv_head, KV_HEADS, PAGE_SIZE, BLOCK, BOTH_TILES), ASSEMBLED)
        keys, values = closed_codes_of(pair, spare, KEY_DIM, VALUE_DIM, BLOCK, KEY_TILE, CODE_BITS, ASSEMBLED)
        scores = closed_scores_of(
            q, pair, keys, spare, unit_bytes, block, position, kv_len, scale, softcap,
            KEY_DIM, BLOCK, WINDOW, SOFTCAP, WINDOW > 0, CODE_BITS, ASSEMBLED, KEYS,
        )  # fmt: skip
        part = add_closed_block(
            scores, pair, values, spare, unit_bytes, part, scale, softcap, q.dtype,
            VALUE_DIM, BLOCK, KEY_TILE, CODE_BITS, SOFTCAP, ASSEMBLED, KEYS,
        )  # fmt: skip
        before, part = end_block(parts, block, end, folds, live, before, part, channels, VALUE_DIM, BLOCK, KEYS)
    return before, part
