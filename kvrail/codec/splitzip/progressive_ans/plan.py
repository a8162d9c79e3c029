"""Where the significands of `splitzip-ans` are cut, and how large both sides are. README.md draws it."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from kvrail.codec.base import BlockSpec
from kvrail.codec.core.sections import Section, bytes_of, sections_of
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode, planes_of
from kvrail.codec.splitzip.tiles.plan import TensorPlan, plans_of

KEPT_BITS = range(1, 7)
"""How many mantissa bits the first stage may show, where an element has 16 bits."""


@dataclass(frozen=True)
class CutPlan:
    """One tensor: the plan of its code in one stage, and how many mantissa bits of a value the first of two shows."""

    whole: TensorPlan
    kept_bits: int

    @cached_property
    def field_bits(self) -> int:
        """Bits of a significand: the mantissa, and the sign above it."""
        return 1 + self.whole.format.mantissa_bits

    @cached_property
    def rest_bits(self) -> int:
        """Low mantissa bits, which the second stage has."""
        return self.whole.format.mantissa_bits - self.kept_bits

    @cached_property
    def shown(self) -> dict[str, Section]:
        """The first stage's planes of significands."""
        return self.planes(self.field_bits - self.rest_bits)

    @cached_property
    def rest(self) -> dict[str, Section]:
        """The second stage's."""
        return self.planes(self.rest_bits)

    @cached_property
    def shown_bytes(self) -> int:
        """Bytes of the first stage's planes, with their padding."""
        return bytes_of(self.shown)

    @cached_property
    def rest_bytes(self) -> int:
        """Bytes of the second stage's planes, with their padding."""
        return bytes_of(self.rest)

    def planes(self, bits: int) -> dict[str, Section]:
        """The planes of a field of `bits` bits, widest first."""
        return sections_of(self.whole.plane_sizes({"plane": planes_of(bits)}))


Plans = tuple[CutPlan, CutPlan]


@lru_cache(maxsize=256)
def cut_plans(spec: BlockSpec, code: WindowCode, kept: tuple[int, int]) -> Plans:
    """Plans of keys and values; kept: mantissa bits that the first stage shows of each. Of eight-bit types all are."""
    mantissa_bits = FORMATS[spec.dtype].mantissa_bits
    bits = (mantissa_bits, mantissa_bits) if FORMATS[spec.dtype].item_bytes == 1 else kept
    keys, values = (CutPlan(plan, each) for plan, each in zip(plans_of(spec, code), bits, strict=True))
    return keys, values
