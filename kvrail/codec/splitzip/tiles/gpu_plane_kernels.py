"""Triton: planes of packed fields, written and read."""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import aligned, load, packed, pointer_to, replicated, spread, store


@triton.jit
def _folded(words, SIZE: tl.constexpr, UPPER: tl.constexpr):
    """Two words of 2 * SIZE as one, SIZE times: of all pairs of SIZE bits the lower ones (UPPER: the upper).

    Bits of the word SIZE further come above the other's. Each takes a shift and an operation of three inputs; what else
    words hold is of no matter.
    """
    MASK: tl.constexpr = 0xFFFFFFFF // ((1 << SIZE) + 1)
    OTHERS: tl.constexpr = 0xFFFFFFFF - MASK
    folded = ()
    for i in tl.static_range(SIZE):
        if UPPER:
            folded += (((words[i] >> SIZE) & MASK) | (words[i + SIZE] & OTHERS),)
        else:
            folded += ((words[i] & MASK) | ((words[i + SIZE] << SIZE) & OTHERS),)
    return folded


@triton.jit
def _store_plane(
    fields,
    plane,
    tile,
    tiles,
    index,
    inside,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store bits SHIFT to SHIFT + BITS of all lanes as the tile's part of a plane; give the plane's end.

    Fields are brought together by halves: the eight segments' to four, to two and to one.
    """
    start = pointer_to(plane + tile.to(tl.int64) * (BITS * VALUES), LANES)
    words = ()
    for s in tl.static_range(8):
        words += (fields[s] >> (SHIFT // 8 * 8),)
    if BITS <= 4:
        words = _folded(words, 4, SHIFT & 4)
    if BITS <= 2:
        words = _folded(words, 2, SHIFT & 2)
    if BITS == 1:
        words = _folded(words, 1, SHIFT & 1)
    for part in tl.static_range(BITS):
        store(start + part * (VALUES // LANES) + index, packed(words[part], LANES), inside, PADDED)
    return plane + aligned(tiles.to(tl.int64) * (BITS * VALUES))


@triton.jit
def store_planes(
    fields,
    plane,
    tile,
    tiles,
    index,
    inside,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the lowest BITS bits of all lanes as planes, widest first; give the last plane's end."""
    if BITS & 8:
        plane = _store_plane(fields, plane, tile, tiles, index, inside, 8, 0, VALUES, PADDED, LANES)
    if BITS & 4:
        plane = _store_plane(fields, plane, tile, tiles, index, inside, 4, BITS // 8 * 8, VALUES, PADDED, LANES)
    if BITS & 2:
        plane = _store_plane(fields, plane, tile, tiles, index, inside, 2, BITS // 4 * 4, VALUES, PADDED, LANES)
    if BITS & 1:
        plane = _store_plane(fields, plane, tile, tiles, index, inside, 1, BITS // 2 * 2, VALUES, PADDED, LANES)
    return plane


@triton.jit
def _load_plane(
    plane,
    tile,
    tiles,
    index,
    inside,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
):
    """A tile's part of a plane, BITS words of packed fields; and the plane's end."""
    start = pointer_to(plane + tile.to(tl.int64) * (BITS * VALUES), LANES) + index
    data = ()
    for part in tl.static_range(BITS):
        data += (load(start + part * (VALUES // LANES), inside, PADDED),)
    return data, plane + aligned(tiles.to(tl.int64) * (BITS * VALUES))


@triton.jit
def load_planes(
    plane,
    tile,
    tiles,
    index,
    inside,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
):
    """The planes of fields of BITS bits, widest first, and the end of the last."""
    planes = ()
    for level in tl.static_range(4):
        if BITS & (8 >> level):
            data, plane = _load_plane(plane, tile, tiles, index, inside, 8 >> level, VALUES, PADDED, LANES)
            planes += data
    return planes, plane


@triton.jit
def field(planes, S: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr):
    """Fields of segment S. The plane of b bits is planes[BITS / 2b * 2b ...], since those before are all wider."""
    field = tl.zeros_like(planes[0]).to(tl.uint32)
    for level in tl.static_range(4):
        if BITS & (8 >> level):
            data = planes[BITS // (16 >> level) * (16 >> level) + S % (8 >> level)]
            word = spread(data, LANES)
            part = (word >> (S // (8 >> level) * (8 >> level))) & replicated((1 << (8 >> level)) - 1, LANES)
            field |= part << (BITS // (16 >> level) * (16 >> level))
    return field


@triton.jit
def fields_at(plane, tile, tiles, j, segment, live, BITS: tl.constexpr, VALUES: tl.constexpr):
    """Fields of BITS bits of single values of a tile, int32, from the planes of all tiles."""
    found = tl.zeros_like(j)
    for level in tl.static_range(4):
        if BITS & (8 >> level):
            start = plane + tile.to(tl.int64) * ((8 >> level) * VALUES)
            byte = tl.load(start + (segment % (8 >> level)) * VALUES + j, mask=live, other=0).to(tl.int32)
            field = (byte >> (segment // (8 >> level) * (8 >> level))) & ((1 << (8 >> level)) - 1)
            found |= field << (BITS // (16 >> level) * (16 >> level))
            plane += aligned(tiles.to(tl.int64) * ((8 >> level) * VALUES))
    return found
