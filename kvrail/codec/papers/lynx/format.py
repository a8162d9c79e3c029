"""The parameters of Lynx's code, with the tables that follow from them."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

Floats = npt.NDArray[np.float32]

CELLS = 8
"""Anchor cells on either side of a chunk's centre."""
STEPS = 16
"""Residual steps of a cell."""
TINY = 2.0**-110
"""A scale below this counts as 0. So no intermediate result is subnormal, which some devices take for 0."""


@dataclass(frozen=True)
class LynxCode:
    """Parameters of the code.

    alpha: skewness of the logarithmic map (Lynx, equation 3), from 0, where the map is linear, to 255. chunk: tokens of
    a channel that share centre and scale, a power of two from 8 to 4,096; a page of no more tokens is one chunk. Raises
    ValueError where they are none of these.
    """

    alpha: float = 0.0
    chunk: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 255:
            raise ValueError(f"alpha is {self.alpha}; it must be from 0 to 255")
        if self.chunk & (self.chunk - 1) or not 8 <= self.chunk <= 4096:
            raise ValueError(f"chunk is {self.chunk}; it must be a power of two from 8 to 4096")

    @property
    def curved(self) -> bool:
        """Whether cells have unequal widths."""
        return self.alpha > 0

    @cached_property
    def edges(self) -> Floats:
        """Distances from the centre at which cells begin and the last ends, in 128ths of the scale, float32 [9]."""
        shares = [number / CELLS for number in range(CELLS + 1)]
        if self.curved:
            shares = [math.expm1(share * math.log1p(self.alpha)) / self.alpha for share in shares]
        return np.array([CELLS * STEPS * share for share in shares], dtype=np.float32)

    @cached_property
    def middles(self) -> Floats:
        """Middles of the cells, in the same unit, float32 [8]."""
        return (self.edges[:-1] + self.edges[1:]) * np.float32(0.5)

    @cached_property
    def steps(self) -> Floats:
        """Widths of a residual step in each cell, in the same unit, float32 [8]."""
        return (self.edges[1:] - self.edges[:-1]) / np.float32(STEPS)

    @cached_property
    def rates(self) -> Floats:
        """Residual steps in a unit, float32 [8]: 1 / steps."""
        return np.float32(1) / self.steps

    @cached_property
    def reach(self) -> np.float32:
        """How far a value lies at most from the middle of its step, in the same unit, and a little for rounding."""
        return np.float32(self.steps.max()) * np.float32(0.5 + 2.0**-9)

    @cached_property
    def id(self) -> int:
        """XXH3 (64 bits) of the chunk, as text, and the tables' bytes: equal where payloads are understood; never 0."""
        tables = (self.edges, self.middles, self.steps, self.rates)
        text = f"{self.chunk}:".encode() + b"".join(table.astype("<f4").tobytes() for table in tables)
        return xxhash.xxh3_64_intdigest(text) or 1
