"""The payload of a block. README.md has the layout; nothing here computes codes."""

from functools import lru_cache

import numpy as np

from kvrail.codec.base import BlockSpec, CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.plans import shaped
from kvrail.codec.core.sections import PairLayout, StreamPart, check_minima, check_scales, parsed_header
from kvrail.codec.papers.kvcomp.codebook import is_code, unpacked_lengths
from kvrail.codec.papers.kvcomp.format import TINY, KVCompCode
from kvrail.codec.papers.kvcomp.plan import TensorPlan

_LEAST_SCALE = int(np.float32(TINY).view(np.uint32)) >> 16
_INFINITY = 0x7F80


Layout = PairLayout[StreamPart]


@lru_cache(maxsize=256)
def plans_of(spec: BlockSpec, code: KVCompCode) -> tuple[TensorPlan, TensorPlan]:
    """Plans of keys and values."""
    return shaped(TensorPlan, spec, (code.keys, code.values))


def parse(payload: Bytes, spec: BlockSpec, code: KVCompCode) -> Layout:
    """The layout of a payload that came, all of it checked but the streams; raises CodecError, naming what is wrong."""
    layout = _parse_header(payload, spec, code)
    layout.check_size(payload)
    for part, start, stream in zip(layout.parts, layout.offsets, layout.streams, strict=True):
        if not part.raw:
            fixed = payload[start : start + part.fixed_bytes]
            _check_tables(fixed, part.plan)
            check_minima(part.plan.sections["minima"].of(fixed), part.plan.format)
            check_scales(part.plan.sections["scales"].of(fixed), _INFINITY, _LEAST_SCALE)
            _check_blocks(fixed, part)
            _check_escapes(payload[stream:], part)
    return layout


def tables_of(fixed: Bytes, plan: TensorPlan) -> list[list[int]]:
    """Code lengths by layer and symbol."""
    rows = plan.sections["tables"].of(fixed).reshape(plan.num_layers, plan.table_bytes)
    return [unpacked_lengths(row, plan.code.symbols) for row in rows]


def _parse_header(payload: Bytes, spec: BlockSpec, code: KVCompCode) -> Layout:
    raws, counts = parsed_header(payload)
    parts = []
    for raw, plan, words, escapes in zip(raws, plans_of(spec, code), counts[0::2], counts[1::2], strict=True):
        if (words or escapes) if raw else plan.travels_raw(words, escapes):
            raise CodecError(f"a payload has raw {raw}, {words} words and {escapes} escapes, which no encoder writes")
        parts.append(StreamPart(plan, raw, words, escapes))
    return Layout((parts[0], parts[1]))


def _check_tables(fixed: Bytes, plan: TensorPlan) -> None:
    odd = plan.code.symbols % 2
    rows = plan.sections["tables"].of(fixed).reshape(plan.num_layers, plan.table_bytes)
    for layer, lengths in enumerate(tables_of(fixed, plan)):
        if not is_code(lengths) or (odd and rows[layer, -1] >> 4):
            raise CodecError(f"the code lengths of layer {layer} of a payload are of no complete code")


def _check_blocks(fixed: Bytes, part: StreamPart) -> None:
    """Check that blocks end where the lengths of their vectors say, and the last at the stream's end."""
    plan = part.plan
    lengths = plan.sections["lengths"].of(fixed).view("<u2").reshape(-1, plan.rows)
    ends = np.cumsum((lengths.sum(axis=1, dtype=np.int64) + 31) // 32)
    if ends[-1] != part.words or (ends != plan.sections["ends"].of(fixed).view("<u4")).any():
        raise CodecError(f"vectors have {ends[-1]} words; the blocks' ends or the header, {part.words}, say otherwise")


def _check_escapes(stream: Bytes, part: StreamPart) -> None:
    """Check that escapes lie on values, in order, none twice."""
    positions, _ = part.escapes_of(stream)
    if part.escapes and int(positions[-1]) >= part.plan.values:
        raise CodecError(f"an escape has position {positions[-1]} of {part.plan.values} values")
