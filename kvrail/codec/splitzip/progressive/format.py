"""How fine the first stage is."""

from dataclasses import dataclass

KEPT_BITS = range(1, 4)
"""How many mantissa bits the first stage may show, where an element has 16 bits."""
CODE_BITS = 3
"""Bits of a level that say its octave."""


def unused_codes(rest_bits: int) -> int:
    """Octaves that the window lacks, given the later mantissa bits: one, whose levels make the topmost two finer."""
    return 1 if rest_bits else 0


@dataclass(frozen=True, slots=True)
class Cut:
    """How fine the first stage is, of keys and of values: an octave has 2^k levels, the topmost two half as many more.

    Eight-bit types travel whole in the first stage, whatever this says. Raises ValueError where a number is not in
    KEPT_BITS.
    """

    keys: int = 2
    values: int = 1

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            kept, known = getattr(self, name), f"{KEPT_BITS[0]} to {KEPT_BITS[-1]}"
            if kept not in KEPT_BITS:
                raise ValueError(f"the first stage shows {kept} mantissa bits of {name}; choose {known}")
