"""Lynx on a CPU: ranges of pages on several threads, straight from pages into payloads and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrail.codec.base import EncodingStats, PagedBlock
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding, byte_pools, gather, on_threads, scatter
from kvrail.codec.papers.lynx.cpu_exact_kernels import decode_exact_pages, encode_exact_pages
from kvrail.codec.papers.lynx.cpu_kernels import decode_pages, encode_pages
from kvrail.codec.papers.lynx.payload import (
    ANCHOR,
    EXACT,
    RESIDUAL,
    Layout,
    Part,
    places_of,
    travels_raw,
)
from kvrail.codec.papers.lynx.plan import Coding, TensorPlan, geometry_of, stages_of

_NAMES = ("words", "positions", "elements")


@dataclass(frozen=True, slots=True)
class _Stream:
    """Words and escapes of a range of pages; slices of memory on loan, which `memory` keeps."""

    memory: Bytes
    words: Bytes
    positions: Bytes
    elements: Bytes


def encode(pages: PagedBlock, coding: Coding) -> CpuEncoding:
    """Encode keys and values into all stages. Raises CodecError where a pool's tensor is not contiguous."""
    plans = coding.plans
    pools, page_ids = byte_pools(pages), np.array(pages.page_ids, dtype=np.int64)
    payloads = [_Coded.of(stage, plans) for stage in (ANCHOR, RESIDUAL)]
    for tensor, (pool, plan) in enumerate(zip(pools, plans, strict=True)):
        _encode_tensor(pool, page_ids, plan, payloads[ANCHOR].fixed(tensor), payloads[RESIDUAL].fixed(tensor))
    parts: list[Part] = []
    if coding.num_stages > EXACT:
        streams = [
            _encode_exact(pool, page_ids, plan, [each.fixed(tensor) for each in payloads])
            for tensor, (pool, plan) in enumerate(zip(pools, plans, strict=True))
        ]
        parts = [part for part, _, _ in streams]
        payloads.append(_join_exact(streams, pools, page_ids))
    raw = sum(plan.raw for plan in plans) + sum(part.raw for part in parts)
    totals = EncodingStats(sum(plan.values for plan in plans), sum(part.escapes for part in parts), raw)
    return CpuEncoding([each.view() for each in payloads], totals)


def decode(stage: int, payloads: Sequence[Bytes], layouts: Sequence[Layout], coding: Coding, out: PagedBlock) -> None:
    """Write into `out` what ANCHOR, or ANCHOR and RESIDUAL, code, or correct by EXACT what RESIDUAL left there.

    Raises CodecError, with `out` untouched, where a pool's tensor is not contiguous.
    """
    pools, page_ids = byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for tensor, (pool, part) in enumerate(zip(pools, layouts[0].parts, strict=True)):
        fixed = [payload[layout.offsets[tensor] :] for payload, layout in zip(payloads, layouts, strict=True)]
        if part.raw or (part.plan.raw and stage == ANCHOR):
            scatter(pool, page_ids, fixed[0][: part.plan.raw_bytes])
        elif stage == EXACT and not part.plan.raw:
            _decode_exact(pool, page_ids, part, fixed[0], payloads[0][layouts[0].streams[tensor] :])
        elif not part.plan.raw:
            _decode_tensor(pool, page_ids, part.plan, fixed)


@dataclass(frozen=True, slots=True)
class _Coded:
    """A payload in the making: its layout and the memory that holds it."""

    layout: Layout
    memory: Bytes

    @classmethod
    def of(cls, stage: int, plans: Sequence[TensorPlan]) -> "_Coded":
        """One of a stage whose size does not depend on the data: header and padding are there, sections are not."""
        layout = Layout((Part(plans[0], stage=stage), Part(plans[1], stage=stage)))
        coded = cls(layout, buffers.take(layout.size))
        layout.complete(coded.memory)
        return coded

    def fixed(self, tensor: int) -> Bytes:
        """The fixed sections of keys (0) or values (1)."""
        start = self.layout.offsets[tensor]
        return self.memory[start : start + self.layout.parts[tensor].fixed_bytes]

    def view(self) -> memoryview:
        """The payload."""
        return self.memory.data[: self.layout.size]


def _encode_tensor(pool: Bytes, page_ids: Ints, plan: TensorPlan, anchors: Bytes, residuals: Bytes) -> None:
    """Fill the sections of both stages."""
    if plan.raw:
        gather(pool, page_ids, anchors, 0)
        return
    code, geometry, (anchor, residual, _) = plan.code, geometry_of(plan), stages_of(plan)

    def encode_range(first: int, last: int) -> None:
        tables = code.edges, code.rates
        encode_pages(pool, page_ids, first, last, geometry, anchor, residual, *tables, anchors, residuals)

    on_threads(encode_range, plan.pages, plan.raw_bytes)
    for name in plan.sections[RESIDUAL].keys() - {"codes"}:
        plan.sections[RESIDUAL][name].of(residuals)[:] = plan.sections[ANCHOR][name].of(anchors)


def _decode_tensor(pool: Bytes, page_ids: Ints, plan: TensorPlan, fixed: Sequence[Bytes]) -> None:
    """Write the last of the stages whose fixed sections these are: ANCHOR, or ANCHOR and RESIDUAL."""
    code, geometry, (anchor, residual, _) = plan.code, geometry_of(plan), stages_of(plan)
    refines, anchors, last_stage = len(fixed) > RESIDUAL, fixed[ANCHOR], fixed[-1]

    def decode_range(first: int, last: int) -> None:
        where = first, last, geometry, anchor, residual, refines
        decode_pages(pool, page_ids, *where, code.edges, code.middles, code.steps, anchors, last_stage)

    on_threads(decode_range, plan.pages, plan.raw_bytes)


def _encode_exact(
    pool: Bytes, page_ids: Ints, plan: TensorPlan, coded: Sequence[Bytes]
) -> tuple[Part, Bytes, list[_Stream]]:
    """What EXACT has of a tensor: its fixed sections and its streams, where it does not travel raw.

    coded: the fixed sections of the stages before.
    """
    fixed = np.empty(plan.fixed_bytes[EXACT], dtype=np.uint8)
    if plan.raw:
        return Part(plan, stage=EXACT), fixed, []
    for name in {"scales", "widths"} & plan.sections[EXACT].keys():
        plan.sections[EXACT][name].of(fixed)[:] = plan.sections[RESIDUAL][name].of(coded[RESIDUAL])
    refined = np.empty((plan.num_layers, plan.num_pages, pool.shape[2]), dtype=np.uint8)
    _decode_tensor(refined, np.arange(plan.num_pages), plan, coded)
    found = on_threads(
        lambda first, last: _encode_range(pool, refined, page_ids, plan, fixed, first, last), plan.pages, plan.raw_bytes
    )
    streams = [each for each in found if each is not None]
    words, escapes = (sum(getattr(each, name).size // 4 for each in streams) for name in ("words", "positions"))
    if len(streams) < len(found) or travels_raw(plan, words, escapes):
        return Part(plan, raw=True, stage=EXACT), fixed, []
    return Part(plan, words=words, escapes=escapes, stage=EXACT), fixed, streams


def _encode_range(
    pool: Bytes, refined: Bytes, page_ids: Ints, plan: TensorPlan, fixed: Bytes, first: int, last: int
) -> _Stream | None:
    """The stream of a range of pages, or None where it has more escapes than pay off."""
    item, tile = plan.format.item_bytes, plan.rows * plan.tile_columns
    most_words = (last - first) * plan.tiles_per_page * -(-tile * item // 4)
    most_escapes = (last - first) * plan.page_values * item // (4 + item) + tile
    memory = buffers.take(4 * (most_words + 2 * most_escapes))
    words = memory[: 4 * most_words]
    positions = memory[words.size :][: 4 * most_escapes]
    elements = memory[words.size + positions.size :][: 4 * most_escapes]
    geometry, stage = geometry_of(plan), stages_of(plan)[EXACT]
    outputs = words.view(np.uint32), positions.view(np.uint32), elements.view(np.uint32)
    used, escapes = encode_exact_pages(
        pool, refined, page_ids, first, last, geometry, stage, plan.code.reach, fixed, *outputs
    )
    if used < 0:
        return None
    narrow = outputs[2][:escapes].astype(f"<u{item}").view(np.uint8)
    return _Stream(memory, words[: 4 * used], positions[: 4 * escapes], narrow)


def _join_exact(streams: Sequence[tuple[Part, Bytes, list[_Stream]]], pools: Sequence[Bytes], page_ids: Ints) -> _Coded:
    """The payload of EXACT."""
    layout = Layout((streams[0][0], streams[1][0]))
    coded = _Coded(layout, buffers.take(layout.size))
    for tensor, (part, fixed, found) in enumerate(streams):
        target = coded.fixed(tensor)
        if part.raw:
            gather(pools[tensor], page_ids, target, 0)
        else:
            target[:] = fixed
        if found:
            for name, piece in zip(_NAMES, part.cut(coded.memory[layout.streams[tensor] :]), strict=True):
                np.concatenate([getattr(each, name) for each in found], out=piece)
    layout.complete(coded.memory)
    return coded


def _decode_exact(pool: Bytes, page_ids: Ints, part: Part, fixed: Bytes, stream: Bytes) -> None:
    """Restore the elements of one tensor in its pages, where they lie refined."""
    plan = part.plan
    ends = np.cumsum(plan.sections[EXACT]["lengths"].of(fixed).view("<u4"), dtype=np.int64)

    def decode_range(first: int, last: int) -> None:
        tile = first * plan.tiles_per_page
        begin = 4 * int(ends[tile - 1]) if tile else 0
        geometry, stage = geometry_of(plan), stages_of(plan)[EXACT]
        decode_exact_pages(pool, page_ids, first, last, geometry, stage, plan.code.reach, fixed, stream[begin:])

    on_threads(decode_range, plan.pages, plan.raw_bytes)
    positions, elements = part.escapes_of(stream)
    page, row, column = places_of(positions, plan)
    kind = f"<u{plan.format.item_bytes}"
    where = page // plan.num_pages, page_ids[page % plan.num_pages], row * plan.columns + column
    pool.view(kind)[where] = elements.view(kind)
