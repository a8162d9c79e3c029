"""The code in plain numpy, page by page, for reading and for testing the others against: they must equal its bits.

Follows README.md in its order. All arithmetic is float32, every operation rounded by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import EncodingStats, PagedBlock
from kvrail.codec.core.arrays import Bits, Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding
from kvrail.codec.core.floats import FloatFormat
from kvrail.codec.core.sections import joined
from kvrail.codec.papers.lynx.format import CELLS, STEPS, TINY, LynxCode
from kvrail.codec.papers.lynx.payload import (
    ANCHOR,
    EXACT,
    RESIDUAL,
    Layout,
    Part,
    places_of,
    travels_raw,
)
from kvrail.codec.papers.lynx.plan import Coding, TensorPlan
from tests.reference.pools import matrices

Floats = npt.NDArray[np.float32]

_UNIT = np.float32(2.0**-7)
_F = np.float32


def encode(pages: PagedBlock, coding: Coding) -> CpuEncoding:
    """The payloads of all stages. Raises CodecError where a pool's tensor is not contiguous."""
    ids = np.array(pages.page_ids, dtype=np.int64)
    parts: list[list[Part]] = [[], [], []]
    bodies: list[list[bytes]] = [[], [], []]
    tails: list[bytes] = []
    for pool, plan in zip(matrices(pages), coding.plans, strict=True):
        dense = [np.zeros(size, dtype=np.uint8) for size in plan.fixed_bytes]
        part, tail = Part(plan, stage=EXACT), [b"", b"", b""]
        if plan.raw:
            dense[ANCHOR] = np.frombuffer(pool[:, ids].tobytes(), dtype=np.uint8)
        else:
            encode_tensor(pool, ids, plan, dense[ANCHOR], dense[RESIDUAL])
            if coding.num_stages > EXACT:
                part, dense[EXACT], tail = _exact(pool, ids, plan, dense)
        for stage, each in enumerate((Part(plan, stage=ANCHOR), Part(plan, stage=RESIDUAL), part)):
            parts[stage].append(each)
            bodies[stage].append(dense[stage].tobytes())
        tails += tail
    payloads = []
    for stage in range(coding.num_stages):
        header = Layout((parts[stage][0], parts[stage][1])).header()
        payloads.append(memoryview(joined((header, *bodies[stage], *(tails if stage == EXACT else ())))))
    raw = sum(plan.raw for plan in coding.plans) + sum(part.raw for part in parts[EXACT])
    escapes = sum(part.escapes for part in parts[EXACT])
    return CpuEncoding(payloads, EncodingStats(sum(plan.values for plan in coding.plans), escapes, raw))


def _exact(pool: Bits, ids: Ints, plan: TensorPlan, dense: Sequence[Bytes]) -> tuple[Part, Bytes, list[bytes]]:
    """EXACT's part, its fixed sections and what follows them; dense: the sections of all stages, EXACT's empty."""
    refined = np.zeros((plan.num_layers, plan.num_pages, plan.rows, plan.columns), dtype=pool.dtype)
    decode_tensor(dense[ANCHOR], dense[RESIDUAL], np.arange(plan.num_pages), plan, refined)
    stream, positions, escaped = encode_exact(pool, ids, refined, dense[RESIDUAL], plan, dense[EXACT])
    if travels_raw(plan, stream.size // 4, positions.size):
        return Part(plan, raw=True, stage=EXACT), np.frombuffer(pool[:, ids].tobytes(), dtype=np.uint8), [b"", b"", b""]
    part = Part(plan, stage=EXACT, words=stream.size // 4, escapes=positions.size)
    return part, dense[EXACT], [stream.tobytes(), positions.tobytes(), escaped.tobytes()]


def decode(stage: int, payloads: Sequence[Bytes], layouts: Sequence[Layout], coding: Coding, out: PagedBlock) -> None:
    """Write a stage into `out`. Raises CodecError, with `out` untouched, where a pool's tensor is not contiguous."""
    ids, source, layout = np.array(out.page_ids, dtype=np.int64), payloads[-1], layouts[-1]
    starts = zip(matrices(out), layout.parts, layout.offsets, layout.streams, layouts[0].offsets, strict=True)
    for pool, part, start, stream, anchors in starts:
        plan, dense = part.plan, source[start : start + part.fixed_bytes]
        if part.raw or (plan.raw and stage == ANCHOR):
            shape = (plan.num_layers, plan.num_pages, plan.rows, plan.columns)
            pool[:, ids] = dense[: plan.raw_bytes].view(pool.dtype).reshape(shape)
        elif stage == EXACT and not plan.raw:
            decode_exact(dense, source[stream:], part, ids, pool)
        elif not plan.raw:
            decode_tensor(payloads[0][anchors:], dense if stage == RESIDUAL else None, ids, plan, pool)


@dataclass(frozen=True)
class Chunks:
    """For each channel of each chunk of a page, float32 [chunks, columns]: centre and scale."""

    centres: Floats
    scales: Floats

    @property
    def units(self) -> Floats:
        """128ths of the scale."""
        return self.scales * _UNIT

    @property
    def rates(self) -> Floats:
        """Units in 1; 0 where the scale is 0."""
        return np.divide(_F(128), self.scales, out=np.zeros_like(self.scales), where=self.scales > 0)

    def rows(self, per_chunk: Floats, plan: TensorPlan) -> Floats:
        """For each row, that of its chunk: [rows, columns]."""
        return np.repeat(per_chunk, plan.code.chunk, axis=0)[: plan.rows]


def to_float(bits: Bits, form: FloatFormat) -> Floats:
    """Elements as float32, which holds every number of every type."""
    if form.mantissa_bits == 7:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if form.mantissa_bits == 10 else bits.view(np.float32)


def to_bits(numbers: Floats, form: FloatFormat) -> Bits:
    """The nearest finite elements, ties to the even one."""
    clamped = np.clip(numbers, _F(-form.largest), _F(form.largest))
    if form.mantissa_bits == 10:
        return clamped.astype(np.float16).view(np.uint16)
    bits = clamped.view(np.uint32)
    if form.mantissa_bits == 23:
        return bits
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def rounded(numbers: Floats, form: FloatFormat) -> Floats:
    """As float32."""
    return to_float(to_bits(numbers, form), form)


def ordered(bits: Bits, form: FloatFormat) -> Ints:
    """Integers in the order of the elements; -0 comes just before 0."""
    size = 8 * form.item_bytes
    signed = bits.astype(np.int64) - (bits.astype(np.int64) >> size - 1 << size)
    keys: Ints = signed ^ (signed >> 63 & (1 << size - 1) - 1)
    return keys


def encode_tensor(pool: Bits, pages: Ints, plan: TensorPlan, anchors: Bytes, residuals: Bytes) -> None:
    """Fill `anchors` and `residuals` (plan.fixed_bytes) of a tensor that does not travel raw.

    pool: elements' bits, [layers, pool pages, rows, columns]; pages: which pages of it.
    """
    anchors[:], residuals[:] = 0, 0
    for number in range(plan.pages):
        layer, page = divmod(number, plan.num_pages)
        with np.errstate(invalid="ignore", over="ignore"):
            _encode_page(pool[layer, pages[page]], number, plan, anchors, residuals)


def decode_tensor(anchors: Bytes, residuals: Bytes | None, pages: Ints, plan: TensorPlan, pool: Bits) -> None:
    """Write stage RESIDUAL into `pool` or, without `residuals`, stage ANCHOR."""
    for number in range(plan.pages):
        layer, page = divmod(number, plan.num_pages)
        chunks = _stored_chunks(anchors, ANCHOR, number, plan)
        values = to_bits(_coarse(_read_codes(anchors, ANCHOR, number, plan), chunks, plan), plan.format)
        if residuals is not None:
            codes = _read_codes(residuals, RESIDUAL, number, plan)
            values = to_bits(_refined(to_float(values, plan.format), codes, chunks, plan), plan.format)
        pool[layer, pages[page]] = values


def encode_exact(
    pool: Bits, pages: Ints, refined: Bits, residuals: Bytes, plan: TensorPlan, dense: Bytes
) -> tuple[Bytes, npt.NDArray[np.uint32], Bits]:
    """Fill `dense`, the fixed sections of stage EXACT; give the stream, and the escapes' positions and elements.

    refined: what stage RESIDUAL leaves, [layers, pages, rows, columns]; residuals: that stage's fixed sections.
    """
    dense[:] = 0
    for name in {"scales", "widths"} & plan.sections[EXACT].keys():
        plan.sections[EXACT][name].of(dense)[:] = plan.sections[RESIDUAL][name].of(residuals)
    lengths, streams = plan.sections[EXACT]["lengths"].of(dense).view("<u4"), []
    positions: list[int] = []
    elements: list[int] = []
    for tile, number, columns in _tiles(plan):
        layer, page = divmod(number, plan.num_pages)
        lowest, spans = _intervals(refined[layer, page], dense, number, plan)
        distance = ordered(pool[layer, pages[page]], plan.format) - lowest
        escaped = (distance < 0) | (distance > spans)
        bits, used = 0, 0
        for row in range(plan.rows):
            for column in columns:
                if escaped[row, column]:
                    positions.append((tile * plan.rows + row) * plan.tile_columns + column - columns.start)
                    elements.append(int(pool[layer, pages[page], row, column]))
                else:
                    bits |= int(distance[row, column]) << used
                used += int(spans[row, column]).bit_length()
        lengths[tile] = -(-used // 32)
        streams.append(bits.to_bytes(4 * int(lengths[tile]), "little"))
    return np.frombuffer(b"".join(streams), np.uint8), np.array(positions, np.uint32), np.array(elements, pool.dtype)


def decode_exact(dense: Bytes, stream: Bytes, part: Part, pages: Ints, pool: Bits) -> None:
    """Restore the elements in `pool`; stream: the words, then the escapes."""
    plan = part.plan
    lengths, start = plan.sections[EXACT]["lengths"].of(dense).view("<u4"), 0
    for tile, number, columns in _tiles(plan):
        layer, page = divmod(number, plan.num_pages)
        matrix = pool[layer, pages[page]]
        lowest, spans = _intervals(matrix, dense, number, plan)
        bits = int.from_bytes(stream[start : start + 4 * int(lengths[tile])].tobytes(), "little")
        start += 4 * int(lengths[tile])
        for row in range(plan.rows):
            for column in columns:
                width = int(spans[row, column]).bit_length()
                key = int(lowest[row, column]) + (bits & (1 << width) - 1)
                matrix[row, column] = _element(key, plan.format)
                bits >>= width
    positions, found = part.escapes_of(stream)
    elements = found.view(f"<u{plan.format.item_bytes}")
    for page, row, column, element in zip(*places_of(positions, plan), elements, strict=True):
        pool[page // plan.num_pages, pages[page % plan.num_pages], row, column] = element


def _encode_page(matrix: Bits, number: int, plan: TensorPlan, anchors: Bytes, residuals: Bytes) -> None:
    """Write metadata and codes of a page [rows, columns]. Infinities make NaN on the way, wide ranges infinities."""
    numbers = to_float(matrix, plan.format)
    _write_chunks(numbers, number, plan, anchors)
    for name in plan.sections[RESIDUAL].keys() - {"codes"}:
        plan.sections[RESIDUAL][name].of(residuals)[:] = plan.sections[ANCHOR][name].of(anchors)
    codes = _codes(numbers, _stored_chunks(anchors, ANCHOR, number, plan), plan)
    _write_codes(codes // STEPS, ANCHOR, number, plan, anchors)
    _write_codes(codes % STEPS, RESIDUAL, number, plan, residuals)


def _codes(numbers: Floats, chunks: Chunks, plan: TensorPlan) -> Ints:
    """Codes of eight bits, in the order of the numbers. NaN: 0."""
    code, rates = plan.code, chunks.rows(chunks.rates, plan)
    if not code.curved:
        away = (numbers - chunks.rows(chunks.centres + _F(0.5) * chunks.units, plan)) * rates
        return np.where(away > -128, np.rint(np.minimum(away, _F(127))), -128).astype(np.int64) + 128
    away = (numbers - chunks.rows(chunks.centres, plan)) * rates
    cells = _cells(away, code)
    within = (np.abs(away) - code.edges[cells]) * code.rates[cells]
    within = np.where(within > 0, np.minimum(within, _F(STEPS - 1)), 0).astype(np.int64)
    outward = STEPS * cells + within
    return np.where(np.isnan(away), 0, np.where(away < 0, 127 - outward, 128 + outward))


def _write_chunks(numbers: Floats, number: int, plan: TensorPlan, anchors: Bytes) -> None:
    """Write minima, scales and, where a page has several chunks, lows and widths; of finite values alone."""
    finite = np.isfinite(numbers)
    least, most = _F(np.inf), _F(-np.inf)
    low = np.where(finite, numbers, least).min(axis=0)
    high = np.where(finite, numbers, most).max(axis=0)
    low, high = (np.where(finite.any(axis=0), each, _F(0)) + _F(0) for each in (low, high))  # -0 becomes 0
    scale_bits = (_F(0.5) * high - _F(0.5) * low).view(np.uint32)
    scale_bits = np.minimum((scale_bits + 0xFFFF) >> 16, 0x7F7F)  # rounded up to bfloat16
    scales = (scale_bits << 16).view(np.float32)
    scales = np.where(scales < _F(TINY), _F(0), scales)
    _page_of(anchors, ANCHOR, "minima", number, plan)[:] = to_bits(low, plan.format)
    _page_of(anchors, ANCHOR, "scales", number, plan)[:] = scales.view(np.uint32) >> 16
    if plan.chunks == 1:
        return
    rate = np.divide(_F(127.5), scales, out=np.zeros_like(scales), where=scales > 0)
    lows = _page_of(anchors, ANCHOR, "lows", number, plan)
    widths = _page_of(anchors, ANCHOR, "widths", number, plan)
    for chunk in range(plan.chunks):
        rows = slice(chunk * plan.code.chunk, (chunk + 1) * plan.code.chunk)
        some = finite[rows].any(axis=0)
        first = np.where(some, np.where(finite[rows], numbers[rows], least).min(axis=0), low)
        last = np.where(some, np.where(finite[rows], numbers[rows], most).max(axis=0), low)
        lows[chunk] = np.floor(np.clip((first - low) * rate, 0, 255))
        widths[chunk] = np.ceil(np.clip((last - low) * rate, 0, 255)) - lows[chunk]


def _stored_chunks(dense: Bytes, stage: int, number: int, plan: TensorPlan) -> Chunks:
    """What a stage says of a page's chunks. Where it has no minima, centres are 0: nothing asks for them."""
    scales = (_page_of(dense, stage, "scales", number, plan).astype(np.uint32) << 16).view(np.float32)[None]
    low = np.zeros_like(scales)
    if "minima" in plan.sections[stage]:
        low = to_float(_page_of(dense, stage, "minima", number, plan), plan.format)[None]
    centres = low + scales
    if plan.chunks > 1:
        widths = _page_of(dense, stage, "widths", number, plan).astype(np.float32)
        if "lows" in plan.sections[stage]:
            ends = widths + _F(2) * _page_of(dense, stage, "lows", number, plan).astype(np.float32)
            centres = centres + scales * ((ends - _F(255)) * _F(1 / 255))
        scales = scales * (widths * _F(1 / 255))
        scales = np.where(scales < _F(TINY), _F(0), scales)
    return Chunks(np.broadcast_to(centres, scales.shape), scales)


def _cells(away: Floats, code: LynxCode) -> Ints:
    """Number of the cell on its side, by the distance from the centre in units; the nearest there is. NaN: 0."""
    cells: Ints = (np.abs(away)[..., None] >= code.edges[1:CELLS]).sum(axis=-1)
    return cells


def _coarse(codes: Ints, chunks: Chunks, plan: TensorPlan) -> Floats:
    """Middles of the cells that anchor codes name."""
    cells = np.where(codes < CELLS, CELLS - 1 - codes, codes - CELLS)
    distance = plan.code.middles[cells] * chunks.rows(chunks.units, plan)
    return chunks.rows(chunks.centres, plan) + np.where(codes < CELLS, -distance, distance)


def _refined(coarse: Floats, codes: Ints, chunks: Chunks, plan: TensorPlan) -> Floats:
    """Middles of the residual's steps around coarse values, whose cells tell how wide the steps are."""
    cells = np.zeros(coarse.shape, dtype=np.int64)
    if plan.code.curved:
        away = coarse - chunks.rows(chunks.centres, plan)
        cells = _cells(away * chunks.rows(chunks.rates, plan), plan.code)
    steps = plan.code.steps[cells] * chunks.rows(chunks.units, plan)
    return coarse + (codes.astype(np.float32) - _F(STEPS / 2 - 0.5)) * steps


def _intervals(refined: Bits, dense: Bytes, number: int, plan: TensorPlan) -> tuple[Ints, Ints]:
    """Where each exact value of a page must lie, as ordered integers: the least, and how many more there are."""
    form, numbers = plan.format, to_float(refined, plan.format)
    chunks = _stored_chunks(dense, EXACT, number, plan)
    octaves = (numbers.view(np.uint32) & 0x7F800000).view(np.float32)
    reach = plan.code.reach * chunks.rows(chunks.units, plan) + octaves * _F(2.0 ** -(form.mantissa_bits + 1))
    below, above = to_bits(numbers - reach, form), to_bits(numbers + reach, form)
    octave = refined >> form.mantissa_bits
    low = ordered(below, form) - (below >> form.mantissa_bits != octave)
    high = ordered(above, form) + (above >> form.mantissa_bits != octave)
    return low, np.maximum(high - low, 0)


def _tiles(plan: TensorPlan) -> Iterator[tuple[int, int, range]]:
    """Number, page number and columns of each tile of stage EXACT."""
    for tile in range(plan.tiles):
        number, place = divmod(tile, plan.tiles_per_page)
        first = place * plan.tile_columns
        yield tile, number, range(first, min(first + plan.tile_columns, plan.columns))


def _element(key: int, form: FloatFormat) -> int:
    """The element's bits of an ordered integer."""
    size = 8 * form.item_bytes
    return key % (1 << size) if key >= 0 else (key ^ (1 << size - 1) - 1) % (1 << size)


def _page_of(dense: Bytes, stage: int, name: str, number: int, plan: TensorPlan) -> Bits:
    """A view of a page's share of a section: [columns], or for lows and widths [chunks, columns], or of codes."""
    size = {"minima": plan.format.item_bytes, "scales": 2}.get(name, 1)
    view: Bits = plan.sections[stage][name].of(dense).view(f"<u{size}").reshape(plan.pages, -1, plan.columns)[number]
    return view[0] if name in ("minima", "scales") else view


def _write_codes(codes: Ints, stage: int, number: int, plan: TensorPlan, dense: Bytes) -> None:
    target = _page_of(dense, stage, "codes", number, plan)
    half = plan.half_rows
    target[: min(half, plan.rows)] = codes[:half]
    target[: plan.rows - half] |= (codes[half:] << 4).astype(np.uint8)


def _read_codes(dense: Bytes, stage: int, number: int, plan: TensorPlan) -> Ints:
    packed = _page_of(dense, stage, "codes", number, plan).astype(np.int64)
    return np.concatenate([packed & 15, packed >> 4])[: plan.rows]
