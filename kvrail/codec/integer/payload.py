"""The payload of a block. README.md has the layout; nothing here computes codes."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import BlockSpec, CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.floats import WIDE
from kvrail.codec.core.plans import shaped
from kvrail.codec.core.sections import PairLayout, PayloadPart, check_minima, check_scales, parsed_header
from kvrail.codec.integer.format import Codes
from kvrail.codec.integer.plan import TensorPlan


@dataclass(frozen=True, slots=True)
class Part(PayloadPart):
    """What a payload has of one tensor.

    raw: it travels as it is. raw_pages: how many of its pages travel as they are, behind the sections; 0 where raw.
    """

    plan: TensorPlan
    raw: bool
    raw_pages: int = 0

    @property
    def pieces(self) -> tuple[int]:
        """The raw pages."""
        return (self.raw_pages * self.plan.page_bytes,)

    @property
    def counts(self) -> tuple[int, int]:
        """Raw pages, and zero."""
        return self.raw_pages, 0


Layout = PairLayout[Part]


@lru_cache(maxsize=256)
def plans_of(spec: BlockSpec, codes: Codes) -> tuple[TensorPlan, TensorPlan]:
    """Plans of keys and values."""
    return shaped(TensorPlan, spec, codes)


def parse(payload: Bytes, spec: BlockSpec, codes: Codes) -> Layout:
    """The layout of a payload that came, all of it checked; raises CodecError, naming what is wrong."""
    layout = _parse_header(payload, spec, codes)
    layout.check_size(payload)
    for part, start in zip(layout.parts, layout.offsets, strict=True):
        if not part.raw:
            _check_sections(payload[start : start + part.fixed_bytes], part)
    return layout


def raw_pages_of(fixed: Bytes, plan: TensorPlan) -> npt.NDArray[np.int64]:
    """Numbers of the pages that travel as they are, ascending; fixed: the sections of a coded tensor."""
    return np.flatnonzero(fixed[: plan.pages])  # flags are the first section


def _parse_header(payload: Bytes, spec: BlockSpec, codes: Codes) -> Layout:
    raws, (keys, gap, values, other_gap) = parsed_header(payload)
    if gap or other_gap:
        raise CodecError(f"a payload's header has {gap} and {other_gap} where zeros are due")
    parts = []
    for raw, plan, raw_pages in zip(raws, plans_of(spec, codes), (keys, values), strict=True):
        if raw_pages if raw else plan.travels_raw(raw_pages):
            raise CodecError(f"a payload has raw {raw} and {raw_pages} raw pages of {plan.pages}")
        parts.append(Part(plan, raw, raw_pages))
    return Layout((parts[0], parts[1]))


def _check_sections(fixed: Bytes, part: Part) -> None:
    """Check that flags, minima and scales are what an encoder can have written."""
    plan = part.plan
    found = {name: where.of(fixed) for name, where in plan.sections.items()}
    if (found["flags"] > 1).any() or int(found["flags"].sum(dtype=np.int64)) != part.raw_pages:
        raise CodecError(f"pages' flags do not say what the header says: {part.raw_pages} raw pages")
    check_minima(found["minima"], plan.format)
    scale_format = WIDE[str(plan.scale_dtype).removeprefix("torch.")]
    check_scales(found["scales"], scale_format.exponents - 1 << scale_format.mantissa_bits)
