"""The payloads of a block's stages. README.md has the layout; nothing here computes codes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import BlockSpec, CodecError
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.plans import matrices
from kvrail.codec.core.sections import (
    PairLayout,
    Section,
    StreamPart,
    aligned,
    check_minima,
    check_scales,
    parsed_header,
)
from kvrail.codec.papers.lynx.format import TINY, LynxCode
from kvrail.codec.papers.lynx.plan import TensorPlan

ANCHOR, RESIDUAL, EXACT = range(3)
"""The stages."""
_LEAST_SCALE = int(np.float32(TINY).view(np.uint32)) >> 16
_INFINITY = 0x7F80


@dataclass(frozen=True, slots=True)
class Part(StreamPart):
    """What a stage has of one tensor. EXACT alone has a stream and escapes, or the tensor raw where that is smaller."""

    stage: int = ANCHOR

    @property
    def sections(self) -> Mapping[str, Section]:
        """What has its place whatever the data is."""
        return {"elements": Section(0, self.plan.raw_bytes)} if self.raw else self.plan.sections[self.stage]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the sections, padding included."""
        return aligned(self.plan.raw_bytes) if self.raw else self.plan.fixed_bytes[self.stage]


Layout = PairLayout[Part]


@lru_cache(maxsize=256)
def plans_of(spec: BlockSpec, code: LynxCode) -> tuple[TensorPlan, TensorPlan]:
    """Plans of keys and values."""
    return matrices(TensorPlan, spec, code)


def travels_raw(plan: TensorPlan, words: int, escapes: int) -> bool:
    """Whether EXACT brings a tensor as it is, because a stream this long with its escapes is no smaller."""
    part = Part(plan, words=words, escapes=escapes, stage=EXACT)
    return not plan.raw and part.fixed_bytes + part.variable_bytes >= plan.raw_bytes


def parse(payload: Bytes, spec: BlockSpec, code: LynxCode, stage: int) -> Layout:
    """The layout of a payload that came, all of it checked; raises CodecError, naming what is wrong."""
    layout = _parse_header(payload, spec, code, stage)
    layout.check_size(payload)
    for part, start, stream in zip(layout.parts, layout.offsets, layout.streams, strict=True):
        if not part.raw:
            _check_sections(payload[start : start + part.fixed_bytes], part)
            _check_escapes(payload[stream:], part)
    return layout


def parse_both(anchors: Bytes, residuals: Bytes, spec: BlockSpec, code: LynxCode) -> tuple[Layout, Layout]:
    """The layouts of ANCHOR and RESIDUAL of a block; raises CodecError also where they don't say the same of chunks."""
    layouts = parse(anchors, spec, code, ANCHOR), parse(residuals, spec, code, RESIDUAL)
    for part, start, other in zip(layouts[ANCHOR].parts, *(layout.offsets for layout in layouts), strict=True):
        for name in part.plan.sections[RESIDUAL].keys() - {"codes"}:
            first = part.plan.sections[ANCHOR][name].of(anchors[start:])
            if not np.array_equal(first, part.plan.sections[RESIDUAL][name].of(residuals[other:])):
                raise CodecError(f"the first two stages have other {name}: they are of other blocks")
    return layouts


def places_of(positions: npt.NDArray[np.uint32], plan: TensorPlan) -> tuple[Ints, Ints, Ints]:
    """Page number, row and column of escapes; `positions` count values tile by tile, row by row, padding included."""
    tile, within = np.divmod(positions.astype(np.int64), plan.rows * plan.tile_columns)
    page, number = np.divmod(tile, plan.tiles_per_page)
    row, column = np.divmod(within, plan.tile_columns)
    return page, row, column + number * plan.tile_columns


def _parse_header(payload: Bytes, spec: BlockSpec, code: LynxCode, stage: int) -> Layout:
    raws, counts = parsed_header(payload)
    parts = []
    for number, plan in enumerate(plans_of(spec, code)):
        raw, (words, escapes) = raws[number], counts[2 * number : 2 * number + 2]
        if (raw or words or escapes) and (stage != EXACT or plan.raw):
            raise CodecError(f"a payload of stage {stage} has raw {raws}, {words} words and {escapes} escapes")
        if raw and (words or escapes):
            raise CodecError(f"a payload has {words} words and {escapes} escapes of a tensor that travels as it is")
        if stage == EXACT and not raw and (words > plan.raw_bytes or escapes > plan.values):
            raise CodecError(f"a payload has {words} words and {escapes} escapes for {plan.values} values")
        if stage == EXACT and not raw and travels_raw(plan, words, escapes):
            raise CodecError(f"a payload has {words} words and {escapes} escapes, more than pay off")
        parts.append(Part(plan, raw, words, escapes, stage))
    return Layout((parts[0], parts[1]))


def _check_sections(dense: Bytes, part: Part) -> None:
    """Check that what describes chunks and tiles is what an encoder can have written."""
    plan, sections = part.plan, part.sections
    if "scales" in sections:
        check_scales(sections["scales"].of(dense), _INFINITY, _LEAST_SCALE)
    if "minima" in sections:
        check_minima(sections["minima"].of(dense), plan.format)
    if "lows" in sections:
        ends = sections["lows"].of(dense).astype(np.uint16) + sections["widths"].of(dense)
        if (ends > 255).any():
            raise CodecError(f"a payload has a chunk that ends at {ends.max()} of 255")
    if "lengths" in sections:
        words = int(sections["lengths"].of(dense).view("<u4").sum(dtype=np.int64))
        if words != part.words:
            raise CodecError(f"tiles have {words} words; the header says {part.words}")


def _check_escapes(stream: Bytes, part: Part) -> None:
    """Check that escapes lie on values, in order, none twice."""
    if not part.escapes:
        return
    plan, (positions, _) = part.plan, part.escapes_of(stream)
    page, _, column = places_of(positions, plan)
    if int(page.max()) >= plan.pages or int(column.max()) >= plan.columns:
        raise CodecError(f"an escape has position {positions.max()}, where there is no value")
