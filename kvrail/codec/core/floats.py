"""The element types that blocks may have."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """An element type: one sign bit, `exponent_bits`, `mantissa_bits`, from the most significant bit down.

    largest: its largest finite number.
    """

    exponent_bits: int
    mantissa_bits: int
    largest: float

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return (1 + self.exponent_bits + self.mantissa_bits) // 8

    @property
    def exponents(self) -> int:
        """How many exponents there are."""
        return 1 << self.exponent_bits


FLOATS = {
    "bfloat16": FloatFormat(8, 7, float.fromhex("0x1.fep127")),
    "float16": FloatFormat(5, 10, 65504.0),
    "float32": FloatFormat(8, 23, float.fromhex("0x1.fffffep127")),
    "float8_e5m2": FloatFormat(5, 2, 57344.0),
    "float8_e4m3fn": FloatFormat(4, 3, 448.0),
}
"""By torch's name of the type."""
WIDE = {name: FLOATS[name] for name in ("bfloat16", "float16", "float32")}
"""Those that lossy codes take: types of eight bits are nearly as coarse already."""
