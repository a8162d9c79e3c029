"""Which values share a minimum and a scale."""

from dataclasses import dataclass

CHANNEL, TOKEN = 2, 4
"""Dimensions of [layers, pages, page_size, kv_heads, dim] over which a group stretches: a page's tokens of one channel,
or the channels of one token and head."""


@dataclass(frozen=True, slots=True)
class IntegerCode:
    """Codes of `bits` bits; key_axis, value_axis: CHANNEL or TOKEN."""

    bits: int
    key_axis: int
    value_axis: int

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


INT8 = IntegerCode(8, TOKEN, TOKEN)
INT4 = IntegerCode(4, CHANNEL, TOKEN)
