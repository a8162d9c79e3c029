"""Triton kernel: records and extensions from the tiles' slots to their places, and the group offsets.

A program has a run of tiles. It sums the counts of all tiles before them, so programs need nothing of each other,
nothing must be zeroed before and there are no atomics; runs grow with the tensor, so that these sums stay a small part
of the work.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

_TILES_PER_GROUP = tl.constexpr(64)
_COUNTS_AT_ONCE = tl.constexpr(4096)


@triton.jit
def _move(source, target, start, size, room, SLOT: tl.constexpr, TILES: tl.constexpr, AT_ONCE: tl.constexpr):
    """Copy `size` elements of each slot to `target` + `start`, blocks [tiles]; nothing at or beyond `room`."""
    slot = tl.arange(0, TILES)[:, None] * SLOT
    size = tl.minimum(size, room - start)
    at = tl.arange(0, AT_ONCE)[None, :]
    # Nothing known of alignment: neighbouring threads then have neighbouring elements, whose stores become one.
    source += tl.multiple_of(slot + at, (1, 1))
    target += start[:, None] + at
    data = tl.load(source, mask=at < size[:, None], other=0)
    for begin in range(0, tl.max(size), AT_ONCE):
        left = size[:, None] - begin
        following = tl.load(source + (begin + AT_ONCE), mask=at + AT_ONCE < left, other=0)  # on its way meanwhile
        tl.store(target + begin, data, mask=at < left)
        data = following


@triton.jit
def _both_sums(a, b, c, d):
    return a + c, b + d


@triton.jit
def _clipped(room):
    """Room as int32, at most what that holds and not below 0."""
    return tl.maximum(tl.minimum(room, 0x7FFFFFFF), 0).to(tl.int32)


@triton.jit
def _pack(
    program,
    tiles,
    tiles_per_program,
    counts,
    groups,
    records,
    extensions,
    packed_records,
    packed_extensions,
    record_room,
    extension_room,
    totals,
    SLOT: tl.constexpr,
    TILES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    first = program * tiles_per_program
    num_records = tl.zeros([_COUNTS_AT_ONCE], tl.int32)
    num_extensions = tl.zeros([_COUNTS_AT_ONCE], tl.int32)
    for begin in range(0, tl.minimum(first, tiles), _COUNTS_AT_ONCE):
        at = begin + tl.arange(0, _COUNTS_AT_ONCE)
        count = tl.load(counts + at, mask=at < first, other=0).to(tl.int32)
        num_records += count & 0x7FFF
        num_extensions += (count & 0x7FFF) * (count >> 15)
    num_records, num_extensions = tl.reduce((num_records.to(tl.int64), num_extensions.to(tl.int64)), 0, _both_sums)
    for step in range(0, tl.cdiv(tl.minimum(tiles_per_program, tiles - first), TILES)):
        tile = first + step * TILES + tl.arange(0, TILES)
        count = tl.load(counts + tile, mask=tile < tiles, other=0).to(tl.int32)
        size = count & 0x7FFF
        wide = size * (count >> 15)
        start = tl.cumsum(size, 0) - size
        wide_start = tl.cumsum(wide, 0) - wide
        group = groups + tile // _TILES_PER_GROUP * 2
        opens = (tile % _TILES_PER_GROUP == 0) & (tile < tiles)
        tl.store(group, (num_records + start).to(tl.uint32), mask=opens)
        tl.store(group + 1, (num_extensions + wide_start).to(tl.uint32), mask=opens)
        slot = (first + step * TILES).to(tl.int64) * SLOT
        room = _clipped(record_room - num_records)
        _move(records + slot, packed_records + num_records, start, size, room, SLOT, TILES, AT_ONCE)
        room = _clipped(extension_room - num_extensions)
        _move(extensions + slot, packed_extensions + num_extensions, wide_start, wide, room, SLOT, TILES, AT_ONCE)
        num_records += tl.sum(size)
        num_extensions += tl.sum(wide)
    if first + tiles_per_program >= tiles:
        tl.store(totals, num_records)
        tl.store(totals + 1, num_extensions)


@triton.jit(
    do_not_specialize=[
        "key_programs",
        "key_tiles",
        "value_tiles",
        "key_tiles_per_program",
        "value_tiles_per_program",
        "key_record_room",
        "value_record_room",
        "key_extension_room",
        "value_extension_room",
    ]
)
def pack_kernel(
    key_programs,
    key_tiles,
    value_tiles,
    key_tiles_per_program,
    value_tiles_per_program,
    key_counts,
    value_counts,
    key_groups,
    value_groups,
    key_records,
    value_records,
    key_extensions,
    value_extensions,
    key_packed_records,
    value_packed_records,
    key_packed_extensions,
    value_packed_extensions,
    key_record_room: tl.int64,
    value_record_room: tl.int64,
    key_extension_room: tl.int64,
    value_extension_room: tl.int64,
    totals,
    KEY_SLOT: tl.constexpr,
    VALUE_SLOT: tl.constexpr,
    TILES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid: the keys' programs, then the values'.

    counts: uint16 [tiles]; groups: uint32 [groups, 2]; records uint16, extensions uint8: slots of KEY_SLOT or
    VALUE_SLOT a tile; packed: where they go; room: elements of these; totals: int64 [2, 2], records and extensions of
    keys and of values, also where there was no room.
    """
    program = tl.program_id(0)
    if program < key_programs:
        _pack(
            program, key_tiles, key_tiles_per_program, key_counts, key_groups, key_records, key_extensions,
            key_packed_records, key_packed_extensions, key_record_room, key_extension_room, totals, KEY_SLOT, TILES,
            AT_ONCE,
        )  # fmt: skip
    else:
        _pack(
            program - key_programs, value_tiles, value_tiles_per_program, value_counts, value_groups, value_records,
            value_extensions, value_packed_records, value_packed_extensions, value_record_room, value_extension_room,
            totals + 2, VALUE_SLOT, TILES, AT_ONCE,
        )  # fmt: skip
