"""Which values share a minimum and a scale."""

from dataclasses import dataclass

CHANNEL, TOKEN = 2, 4
"""Dimensions of [layers, pages, page_size, kv_heads, dim] over which a group stretches: a page's tokens of one channel,
or the channels of one token and head."""


@dataclass(frozen=True, slots=True)
class IntegerCode:
    """Codes of `bits` bits, of keys or of values; axis: CHANNEL or TOKEN."""

    bits: int
    axis: int

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


Codes = tuple[IntegerCode, IntegerCode]
"""Of keys and of values."""
INT8: Codes = IntegerCode(8, TOKEN), IntegerCode(8, TOKEN)
INT4: Codes = IntegerCode(4, CHANNEL), IntegerCode(4, TOKEN)
