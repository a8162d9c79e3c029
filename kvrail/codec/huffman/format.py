"""Which element types there are, and what words a chunk of each is cut into."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """An element type.

    name: torch's. number: what travels. word_bytes: of a word, 1, 2, 4 or 8; its bytes are the planes.
    words: words an element. rotated: whether words are rotated left by one bit, which brings the sign below the
    mantissa and the exponent's bits, or the first eight, into the highest byte.
    """

    name: str
    number: int
    word_bytes: int
    rotated: bool = False
    words: int = 1

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return self.word_bytes * self.words

    @property
    def chunk_bits(self) -> int:
        """Binary logarithm of the words of a chunk, which with its planes stays in a core's second-level cache."""
        return {1: 17, 2: 18, 4: 17, 8: 16}[self.word_bytes]


_ALL = (
    Format("bfloat16", 1, 2, True),
    Format("float16", 2, 2, True),
    Format("float32", 3, 4, True),
    Format("float64", 4, 8, True),
    Format("float8_e4m3fn", 5, 1),
    Format("float8_e5m2", 6, 1),
    Format("float8_e4m3fnuz", 7, 1),
    Format("float8_e5m2fnuz", 8, 1),
    Format("float8_e8m0fnu", 9, 1),
    Format("float4_e2m1fn_x2", 10, 1),
    Format("uint8", 11, 1),
    Format("int8", 12, 1),
    Format("bool", 13, 1),
    Format("int16", 14, 2),
    Format("uint16", 15, 2),
    Format("int32", 16, 4),
    Format("uint32", 17, 4),
    Format("int64", 18, 8),
    Format("uint64", 19, 8),
    Format("complex64", 20, 4, True, 2),
    Format("complex128", 21, 8, True, 2),
)
FORMATS = {one.name: one for one in _ALL}
"""By torch's name of the type."""
BY_NUMBER = {one.number: one for one in _ALL}
