"""What the code knows of element types, and the parameters of a code."""

from dataclasses import dataclass

from kvrail.codec.core.floats import FLOATS

SEGMENTS = 8
"""A tile is eight segments of equal length; fields are packed across them (README.md)."""


def planes_of(bits: int) -> tuple[int, ...]:
    """Widths of the planes of a field of `bits` bits, from its least significant bits up: eight, four, two, one."""
    widths = []
    for width in (8, 4, 2, 1):
        while bits >= width:
            widths.append(width)
            bits -= width
    return tuple(widths)


FORMATS = {name: FLOATS[name] for name in ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")}
"""Element types that the codes take. Arithmetic on exponents is modulo how many there are."""


@dataclass(frozen=True, slots=True)
class WindowCode:
    """How exponents become codes: an exponent e in the window (top - 2^code_bits, top] has the code top - e.

    per_channel: every channel of a page has a top of its own, else one is fixed for all of a layer's keys or values.
    chunk: values of a tile at most, a power of two from 256 to 16,384.
    """

    code_bits: int
    per_channel: bool
    chunk: int = 4096

    def __post_init__(self) -> None:
        if self.code_bits not in (3, 4):
            raise ValueError(f"code_bits is {self.code_bits}; it must be 3 or 4")
        if self.chunk & (self.chunk - 1) or not 256 <= self.chunk <= 16384:
            raise ValueError(f"chunk is {self.chunk}; it must be a power of two from 256 to 16384")

    @property
    def window(self) -> int:
        """How many exponents have a code."""
        return 1 << self.code_bits

    @property
    def position_bits(self) -> int:
        """Bits of a record that say where in its tile a value lies."""
        return self.chunk.bit_length() - 1
