"""Where everything of one tensor lies in the two stages. README.md draws it."""

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

from kvrail.codec.base import BlockSpec
from kvrail.codec.core.sections import Section, sections_of
from kvrail.codec.splitzip.progressive.format import CODE_BITS, Cut, unused_codes
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode, planes_of
from kvrail.codec.splitzip.tiles.plan import TensorPlan, plans_of


@dataclass(frozen=True)
class AnchorPlan(TensorPlan):
    """One tensor's part of the first stage, which shows `kept_bits` mantissa bits of every value."""

    kept_bits: int

    @cached_property
    def planes(self) -> dict[str, tuple[int, ...]]:
        """One field: the level, above it the sign."""
        return {"anchor": planes_of(self.code.code_bits + self.kept_bits + 1)}

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Its planes, and the tops of the channels."""
        tops = {"tops": self.tiles, "drops": self.tiles * self.drop_bytes}
        return sections_of(self.plane_sizes(self.planes) | tops)

    @cached_property
    def rest(self) -> "RestPlan":
        """The tensor's part of the second stage."""
        return RestPlan(**_shape(self), kept_bits=self.kept_bits)

    @property
    def coded_bytes(self) -> int:
        """Bytes of both stages' parts but for the escapes: what pays off is told by both together."""
        return self.fixed_bytes + self.rest.fixed_bytes


@dataclass(frozen=True)
class RestPlan(TensorPlan):
    """One tensor's part of the second stage: the mantissa bits behind the first `kept_bits`, and the escapes."""

    kept_bits: int

    @cached_property
    def rest_bits(self) -> int:
        """Low mantissa bits of a value."""
        return self.format.mantissa_bits - self.kept_bits

    @cached_property
    def planes(self) -> dict[str, tuple[int, ...]]:
        """The one field."""
        return {"rest": planes_of(self.rest_bits)}

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Its planes, and how many escapes tiles have."""
        escapes = {"counts": 2 * self.tiles, "groups": 8 * self.groups}
        return sections_of(self.plane_sizes(self.planes) | escapes)

    @property
    def coded_bytes(self) -> int:
        """As of the first stage's plan."""
        return AnchorPlan(**_shape(self), kept_bits=self.kept_bits).coded_bytes


Plans = tuple[AnchorPlan, AnchorPlan]


@lru_cache(maxsize=256)
def anchor_plans(spec: BlockSpec, cut: Cut, chunk: int = 4096) -> Plans:
    """Plans of keys and values; chunk: values of a tile at most, as WindowCode has it."""
    mantissa_bits = FORMATS[spec.dtype].mantissa_bits
    kept = (mantissa_bits, mantissa_bits) if FORMATS[spec.dtype].item_bytes == 1 else (cut.keys, cut.values)
    code = WindowCode(CODE_BITS, per_channel=True, chunk=chunk, unused=unused_codes(mantissa_bits - kept[0]))
    keys, values = (
        AnchorPlan(**_shape(plan), kept_bits=bits) for plan, bits in zip(plans_of(spec, code), kept, strict=True)
    )
    return keys, values


def one_stage(plan: AnchorPlan) -> TensorPlan:
    """The plan of the same code in one stage."""
    return TensorPlan(**_shape(plan))


def _shape(plan: TensorPlan) -> dict[str, Any]:
    return {field.name: getattr(plan, field.name) for field in fields(TensorPlan)}
