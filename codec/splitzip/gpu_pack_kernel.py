"""Triton kernel: records and extensions from the tiles' slots to their places, and the group offsets.

A program has a run of groups. It sums the counts of all tiles before them, so programs need nothing of each other,
nothing must be zeroed before and there are no atomics; runs grow with the tensor, so that these sums stay a small part
of the work.
"""

import triton
import triton.language as tl

_TILES_PER_GROUP = tl.constexpr(64)
_COUNTS_AT_ONCE = tl.constexpr(8192)
_RECORDS_AT_ONCE = tl.constexpr(32)


@triton.jit
def _move(source, target, size, room, SLOT: tl.constexpr):
    """Copy `size` [64] elements of each of 64 slots to `target` [64]; nothing at or beyond `room`."""
    tile = tl.arange(0, _TILES_PER_GROUP)[:, None]
    for begin in range(0, tl.max(size), _RECORDS_AT_ONCE):
        at = begin + tl.arange(0, _RECORDS_AT_ONCE)[None, :]
        live = (at < size[:, None]) & (target[1][:, None] + at < room)
        data = tl.load(source + tile * SLOT + at, mask=live, other=0)
        tl.store(target[0] + target[1][:, None] + at, data, mask=live)


@triton.jit
def _pack(
    program,
    tiles,
    groups_per_program,
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
):
    first = program * groups_per_program
    num_groups = tl.cdiv(tiles, _TILES_PER_GROUP)
    num_records = tl.zeros([], tl.int64)
    num_extensions = tl.zeros([], tl.int64)
    for begin in range(0, tl.minimum(first * _TILES_PER_GROUP, tiles), _COUNTS_AT_ONCE):
        at = begin + tl.arange(0, _COUNTS_AT_ONCE)
        count = tl.load(counts + at, mask=at < first * _TILES_PER_GROUP, other=0).to(tl.int32)
        num_records += tl.sum(count & 0x7FFF)
        num_extensions += tl.sum((count & 0x7FFF) * (count >> 15))
    for step in range(0, tl.minimum(groups_per_program, num_groups - first)):
        group = first + step
        tl.store(groups + 2 * group, num_records.to(tl.uint32))
        tl.store(groups + 2 * group + 1, num_extensions.to(tl.uint32))
        tile = group * _TILES_PER_GROUP + tl.arange(0, _TILES_PER_GROUP)
        count = tl.load(counts + tile, mask=tile < tiles, other=0).to(tl.int32)
        size = count & 0x7FFF
        slot = group.to(tl.int64) * (_TILES_PER_GROUP * SLOT)
        _move(records + slot, (packed_records, num_records + tl.cumsum(size, 0) - size), size, record_room, SLOT)
        num_records += tl.sum(size)
        size = size * (count >> 15)
        _move(
            extensions + slot,
            (packed_extensions, num_extensions + tl.cumsum(size, 0) - size),
            size,
            extension_room,
            SLOT,
        )
        num_extensions += tl.sum(size)
    if first + groups_per_program >= num_groups:
        tl.store(totals, num_records)
        tl.store(totals + 1, num_extensions)


@triton.jit(
    do_not_specialize=[
        "key_programs",
        "key_tiles",
        "value_tiles",
        "key_groups_per_program",
        "value_groups_per_program",
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
    key_groups_per_program,
    value_groups_per_program,
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
):
    """Grid: the keys' programs, then the values'.

    counts: uint16 [tiles]; groups: uint32 [groups, 2]; records uint16, extensions uint8: slots of KEY_SLOT or
    VALUE_SLOT a tile; packed: where they go, with room for so many; totals: int64 [2, 2], records and extensions of
    keys and of values, also where there was no room.
    """
    program = tl.program_id(0)
    if program < key_programs:
        _pack(
            program, key_tiles, key_groups_per_program, key_counts, key_groups, key_records, key_extensions,
            key_packed_records, key_packed_extensions, key_record_room, key_extension_room, totals, KEY_SLOT,
        )  # fmt: skip
    else:
        _pack(
            program - key_programs, value_tiles, value_groups_per_program, value_counts, value_groups, value_records,
            value_extensions, value_packed_records, value_packed_extensions, value_record_room, value_extension_room,
            totals + 2, VALUE_SLOT,
        )  # fmt: skip
