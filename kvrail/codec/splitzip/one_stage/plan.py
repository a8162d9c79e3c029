"""What both ends know of a block before any of its bytes."""

from dataclasses import dataclass

from kvrail.codec.core.arrays import Ints
from kvrail.codec.splitzip.tiles.plan import TensorPlan


@dataclass(frozen=True, slots=True)
class Coding:
    """Plans of keys and values, and the tops of their windows.

    tops: int64 [layers] each, or None where channels have their own.
    """

    plans: tuple[TensorPlan, TensorPlan]
    tops: tuple[Ints | None, Ints | None] = (None, None)
