"""The code, value by value, for reading and for testing the others against: they must equal it bit for bit.

Follows README.md word by word and in its order. Slow: about a megabyte a second.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvrail.codec.core.arrays import Bits, Bytes, Ints
from kvrail.codec.splitzip.tiles.format import SEGMENTS
from kvrail.codec.splitzip.tiles.payload import WIDE, Layout, check_records, offsets_of_groups
from kvrail.codec.splitzip.tiles.plan import TensorPlan


def encode_tensor(
    pool: Bits, pages: Ints, plan: TensorPlan, tops: Ints | None, dense: Bytes
) -> tuple[npt.NDArray[np.uint16], Bytes]:
    """Fill `dense` (plan.fixed_bytes) and give records and extensions.

    pool: elements' bits, [layers, pool pages, rows, columns]; pages: which pages of it; tops: [layers], or None where
    channels have their own.
    """
    dense[:] = 0
    records: list[int] = []
    extensions: list[int] = []
    counts = plan.sections["counts"].of(dense).view("<u2")
    for tile, layer, bits, real in tiles(pool, pages, plan):
        exponents, significands = _split(bits, plan)
        top = _channel_tops(exponents, real, plan, dense, tile) if tops is None else tops[layer]
        distance = np.where(real, (top - exponents) % plan.format.exponents, 0)
        write_planes(np.where(real, significands, 0), plan, "significand", plan.significand_planes, dense, tile)
        write_planes(distance % (1 << plan.code.code_bits), plan, "code", plan.code_planes, dense, tile)
        beyond = [  # (8 j + s, how far outside the window)
            (SEGMENTS * j + s, int(distance[s, j]) - plan.code.window)
            for j in range(plan.segment_values)
            for s in range(SEGMENTS)
            if distance[s, j] >= plan.code.window
        ]
        limit = 1 << 16 - plan.code.position_bits
        wide = any(far >= limit for _, far in beyond)
        counts[tile] = len(beyond) | (WIDE if wide else 0)
        records += [position | (far % limit) << plan.code.position_bits for position, far in beyond]
        extensions += [far // limit for _, far in beyond if wide]
    _write_groups(plan, dense)
    return np.array(records, dtype="<u2"), np.array(extensions, dtype=np.uint8)


def decode_tensor(
    dense: Bytes,
    records: npt.NDArray[np.uint16],
    extensions: Bytes,
    pages: Ints,
    plan: TensorPlan,
    tops: Ints | None,
    pool: Bits,
) -> None:
    """Write the elements into `pool`; the inverse of `encode_tensor`. Raises CodecError where a record lies nowhere."""
    check_records(dense, records, plan)
    counts = plan.sections["counts"].of(dense).view("<u2")
    next_record, next_extension = 0, 0
    for tile, layer, bits, real in tiles(pool, pages, plan):
        top = _stored_tops(plan, dense, tile) if tops is None else tops[layer]
        significands = read_planes(plan, "significand", plan.significand_planes, dense, tile)
        distance = read_planes(plan, "code", plan.code_planes, dense, tile)
        count, wide = int(counts[tile]) & (WIDE - 1), bool(int(counts[tile]) & WIDE)
        for record in records[next_record : next_record + count].tolist():
            position, far = record % plan.code.chunk, record // plan.code.chunk
            if wide:
                far += int(extensions[next_extension]) << (16 - plan.code.position_bits)
                next_extension += 1
            distance[position % SEGMENTS, position // SEGMENTS] = plan.code.window + far
        next_record += count
        values = _join((top - distance) % plan.format.exponents, significands, plan)
        store(pool, pages, plan, tile, np.where(real, values, bits), real)


def _indices(plan: TensorPlan, tile: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """For each value [8, J] of a tile: its index in the page, and whether it is one."""
    s, j = np.arange(SEGMENTS)[:, None], np.arange(plan.segment_values)[None, :]
    number = tile % plan.tiles_per_page
    if not plan.code.per_channel:
        index = (number * SEGMENTS + s) * plan.segment_values + j
        return index, index < plan.page_values
    row = s * plan.segment_rows + j // plan.tile_width
    column = number * plan.tile_width + j % plan.tile_width
    return row * plan.columns + column, (row < plan.rows) & (column < plan.columns)


def tiles(pool: Bits, pages: Ints, plan: TensorPlan) -> Iterator[tuple[int, int, Ints, npt.NDArray[np.bool_]]]:
    """Number, layer, bits [8, J] (padding 0) and which of them are values, of each tile."""
    for tile in range(plan.tiles):
        layer, page = divmod(tile // plan.tiles_per_page, plan.num_pages)
        index, real = _indices(plan, tile)
        matrix = pool[layer, pages[page]].reshape(-1).astype(np.int64)
        yield tile, layer, np.where(real, matrix[np.where(real, index, 0)], 0), real


def store(pool: Bits, pages: Ints, plan: TensorPlan, tile: int, values: Ints, real: npt.NDArray[np.bool_]) -> None:
    """Write a tile's values [8, J] into its page, all but padding."""
    layer, page = divmod(tile // plan.tiles_per_page, plan.num_pages)
    index, _ = _indices(plan, tile)
    pool[layer, pages[page]].reshape(-1)[index[real]] = values[real].astype(pool.dtype)


def _split(bits: Ints, plan: TensorPlan) -> tuple[Ints, Ints]:
    """Exponents and significands (the sign above the mantissa)."""
    mantissa_bits, exponents = plan.format.mantissa_bits, plan.format.exponents
    sign = bits // (exponents << mantissa_bits)
    return bits >> mantissa_bits & exponents - 1, sign << mantissa_bits | bits & (1 << mantissa_bits) - 1


def _join(exponents: Ints, significands: Ints, plan: TensorPlan) -> Ints:
    mantissa_bits = plan.format.mantissa_bits
    sign = significands >> mantissa_bits
    mantissa = significands & (1 << mantissa_bits) - 1
    return (sign * plan.format.exponents + exponents) << mantissa_bits | mantissa


def _channel_tops(exponents: Ints, real: npt.NDArray[np.bool_], plan: TensorPlan, dense: Bytes, tile: int) -> Ints:
    """Write a tile's top and drops; give the top of each value's column, [J]."""
    largest = np.where(real, exponents, 0).reshape(SEGMENTS, plan.segment_rows, plan.tile_width).max(axis=(0, 1))
    top = int(largest.max())
    plan.sections["tops"].of(dense)[tile] = top
    padded = np.zeros(2 * plan.drop_bytes, dtype=np.int64)
    padded[: plan.tile_width] = np.minimum(top - largest, 15)
    low, high = padded[: plan.drop_bytes], padded[plan.drop_bytes :]
    plan.sections["drops"].of(dense).reshape(-1, plan.drop_bytes)[tile] = low | high << 4
    return _stored_tops(plan, dense, tile)


def _stored_tops(plan: TensorPlan, dense: Bytes, tile: int) -> Ints:
    packed = plan.sections["drops"].of(dense).reshape(-1, plan.drop_bytes)[tile].astype(np.int64)
    drops = np.concatenate([packed & 15, packed >> 4])[: plan.tile_width]
    return np.tile(int(plan.sections["tops"].of(dense)[tile]) - drops, plan.segment_rows)


def write_planes(fields: Ints, plan: TensorPlan, name: str, widths: tuple[int, ...], dense: Bytes, tile: int) -> None:
    """Write a tile's fields [8, J] to planes of such widths, into zeros."""
    shift = 0
    for number, width in enumerate(widths):
        plane = plan.sections[f"{name}{number}"].of(dense).reshape(plan.tiles, width, plan.segment_values)
        for s in range(SEGMENTS):
            part = fields[s] >> shift & (1 << width) - 1
            plane[tile, s % width] |= (part << s // width * width).astype(np.uint8)
        shift += width


def read_planes(plan: TensorPlan, name: str, widths: tuple[int, ...], dense: Bytes, tile: int) -> Ints:
    """The inverse of `write_planes`."""
    fields = np.zeros((SEGMENTS, plan.segment_values), dtype=np.int64)
    shift = 0
    for number, width in enumerate(widths):
        plane = plan.sections[f"{name}{number}"].of(dense).reshape(plan.tiles, width, plan.segment_values)
        for s in range(SEGMENTS):
            part = plane[tile, s % width].astype(np.int64) >> s // width * width & (1 << width) - 1
            fields[s] |= part << shift
        shift += width
    return fields


def _write_groups(plan: TensorPlan, dense: Bytes) -> None:
    counts = plan.sections["counts"].of(dense).view("<u2")
    sizes = (counts & (WIDE - 1)).astype(np.int64)
    groups = plan.sections["groups"].of(dense).view("<u4").reshape(-1, 2)
    groups[:, 0] = offsets_of_groups(sizes)
    groups[:, 1] = offsets_of_groups(np.where(counts & WIDE, sizes, 0))


def place_whole(source: Bytes, layout: Layout, pages: Ints, pools: Sequence[Bits]) -> None:
    """Write what a payload brings as it is: keys or values that travel raw, and scales."""
    starts = [start if part.raw else None for part, start in zip(layout.parts, layout.offsets, strict=True)]
    starts += [layout.scale_offset, layout.scale_offset + layout.scale_bytes // 2]
    for pool, start in zip(pools, starts, strict=False):
        if start is not None:
            shape = (pool.shape[0], pages.size, *pool.shape[2:])
            size = int(np.prod(shape)) * pool.itemsize
            pool[:, pages] = source[start : start + size].view(pool.dtype).reshape(shape)
