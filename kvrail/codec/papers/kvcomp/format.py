"""The granularities of KVComp's scales, and the parameters of the code."""

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import xxhash

LEAST_SCALE, LARGEST_SCALE = 0.005, 0.5
"""Of relative quantisation scales: symbols fit in a byte, and a range has at least two steps."""
TINY = 2.0**-110
"""A scale below this counts as 0, so that no step is subnormal."""
SLACK = 2.0**-12
"""A scale is this share smaller than asked for, more than float32 arithmetic can add to an error."""
_TRUNCATED = 2.0**-7
"""The most that a scale loses by being cut to bfloat16, as a share."""


class Granularity(Enum):
    """Which values share a scale: axes of [layers, pages, page_size, kv_heads, dim], by the paper's name."""

    BLOCK = (2, 3, 4)
    """BlockQuant: all values of a page of a layer."""
    CHANNEL = (2,)
    """ChannelQuant: the tokens of a page, of one channel of one head."""
    TOKEN = (3, 4)
    """TokenQuant: all heads and channels of one token."""


@dataclass(frozen=True, slots=True)
class TensorCode:
    """How keys, or values, are quantised.

    scale: the paper's relative quantisation scale, a step as a share of the unit's range; a value errs by at most half
    of it. Raises ValueError where it is not from LEAST_SCALE to LARGEST_SCALE.
    """

    granularity: Granularity
    scale: float

    def __post_init__(self) -> None:
        if not LEAST_SCALE <= self.scale <= LARGEST_SCALE:
            raise ValueError(f"scale is {self.scale}; it must be from {LEAST_SCALE} to {LARGEST_SCALE}")

    @property
    def top(self) -> int:
        """The largest symbol: that of a unit's maximum, with the smallest step that the scale can become."""
        return math.floor(1 / (self.scale * (1 - SLACK) * (1 - _TRUNCATED)) + 0.5)

    @property
    def symbols(self) -> int:
        """How many symbols there are, at most 203."""
        return self.top + 1


@dataclass(frozen=True)
class KVCompCode:
    """Parameters of the code, for keys and for values; both ends must have the same."""

    keys: TensorCode
    values: TensorCode

    @cached_property
    def id(self) -> int:
        """XXH3 (64 bits) of the parameters as text: equal where payloads are understood; never 0."""
        text = ",".join(f"{each.granularity.name}:{each.scale!r}" for each in (self.keys, self.values))
        return xxhash.xxh3_64_intdigest(text.encode()) or 1


_VALUES = TensorCode(Granularity.TOKEN, 0.15)
CHANNEL_CODE = KVCompCode(TensorCode(Granularity.CHANNEL, 0.05), _VALUES)
"""The paper's text: safe where a few channels of the keys are much larger than others."""
BLOCK_CODE = KVCompCode(TensorCode(Granularity.BLOCK, 0.05), _VALUES)
"""The paper's recommended point."""
