"""Triton kernels: significands cut in two, put together from what the first stage shows, and completed in the pages."""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import pointer_to, replicated, store
from kvrail.codec.splitzip.tiles.gpu_plane_kernels import field, load_planes, store_planes
from kvrail.codec.splitzip.tiles.gpu_tile_kernels import RUNTIME, load_segment, page_of, words_of


@triton.jit(do_not_specialize=["tiles"])
def cut_kernel(
    source,
    shown,
    rest,
    tiles,
    FIELD_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Grid: tiles. Fields of FIELD_BITS to those without their REST_BITS low bits, and to these; all in planes, uint8.

    WORDS: of a segment, LANES values each, padded to a power of two.
    """
    tile = tl.program_id(0)
    index = tl.arange(0, WORDS)
    inside = index * LANES < SEGMENT
    planes, _ = load_planes(source, tile, tiles, index, inside, FIELD_BITS, SEGMENT, True, LANES)
    whole, high = (), ()
    for s in tl.static_range(8):
        word = field(planes, s, FIELD_BITS, LANES)
        whole += (word,)
        high += (word >> REST_BITS,)
    store_planes(whole, rest, tile, tiles, index, inside, REST_BITS, SEGMENT, True, LANES)
    store_planes(high, shown, tile, tiles, index, inside, FIELD_BITS - REST_BITS, SEGMENT, True, LANES)


@triton.jit(do_not_specialize=["tiles"])
def join_kernel(
    shown,
    target,
    tiles,
    FIELD_BITS: tl.constexpr,
    REST_BITS: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Grid: tiles. The inverse of cut_kernel where the REST_BITS low bits are not known: they are the middle's."""
    tile = tl.program_id(0)
    index = tl.arange(0, WORDS)
    inside = index * LANES < SEGMENT
    planes, _ = load_planes(shown, tile, tiles, index, inside, FIELD_BITS - REST_BITS, SEGMENT, True, LANES)
    whole = ()
    for s in tl.static_range(8):
        word = field(planes, s, FIELD_BITS - REST_BITS, LANES)
        if REST_BITS > 0:
            word = (word << REST_BITS) | replicated(1 << (REST_BITS - 1), LANES)
        whole += (word,)
    store_planes(whole, target, tile, tiles, index, inside, FIELD_BITS, SEGMENT, True, LANES)


@triton.jit
def _complete_tile(tile, tiles, pool, layer_stride, page_stride, pages, num_pages, rest, G: tl.constexpr):
    SEGMENT: tl.constexpr = G.SEGMENT_ROWS * G.WIDTH
    STEP: tl.constexpr = G.SEGMENT_ROWS * G.COLUMNS // G.LANES
    PAGE_WORDS: tl.constexpr = G.ROWS * G.COLUMNS // G.LANES
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    HIGH: tl.constexpr = (1 << (8 * G.ITEM_BYTES)) - (1 << REST_BITS)
    _, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, G)
    words = pointer_to(page, G.ITEM_BYTES * G.LANES)
    index, first, inside, real = words_of(tile % G.PER_PAGE, G)
    planes, _ = load_planes(rest, tile, tiles, index, inside, REST_BITS, SEGMENT, G.PADDED, G.LANES)
    coarse = ()
    for s in tl.static_range(8):  # all loads are under way before the first is used
        coarse += (load_segment(words, first + s * STEP, real, PAGE_WORDS, G.PADDED),)
    for s in tl.static_range(8):
        word = (coarse[s] & replicated(HIGH, G.LANES)) | field(planes, s, REST_BITS, G.LANES)
        store(words + first + s * STEP, word, real & (first + s * STEP < PAGE_WORDS), G.PADDED)


@triton.jit(do_not_specialize=RUNTIME)
def complete_kernel(
    keys,
    values,
    key_layer_stride: tl.int64,
    value_layer_stride: tl.int64,
    key_page_stride: tl.int64,
    value_page_stride: tl.int64,
    pages,
    num_pages,
    key_tiles,
    value_tiles,
    key_rest,
    value_rest,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Grid: key tiles, then value tiles. Replaces the low mantissa bits of values in their pages.

    keys, values: uint8, the pools; strides: bytes; pages: int64 [num_pages], page ids; rest: uint8, planes of low bits.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _complete_tile(tile, key_tiles, keys, key_layer_stride, key_page_stride, pages, num_pages, key_rest, KEYS)
    else:
        _complete_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, pages, num_pages, value_rest,
            VALUES,
        )  # fmt: skip
