"""How a model's KV cache lies in pages. Free of torch: handshakes and the router carry it."""

from dataclasses import dataclass, field

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e5m2": 1, "float8_e4m3fn": 1}
"""Element types that pages may have, with their size in bytes."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and element type of the KV cache; both ends of a transfer must agree on every field.

    One layer's keys of one page are `[page_size, num_kv_heads, key_dim]`, its values
    `[page_size, num_kv_heads, value_dim]`. Eight-bit types carry one float32 scale a token and head, for keys and
    values apart: `[page_size, num_kv_heads]`.

    page_format: how a worker keeps its own pages (`kvrail.engine.kv.formats`); empty: as the element type has it. No
    part of what both ends agree on: whatever it is, the same crosses.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    dtype: str
    page_format: str = field(default="", compare=False)

    @property
    def scaled(self) -> bool:
        """Whether elements carry scales."""
        return DTYPE_BYTES[self.dtype] == 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys, values and scales, as codecs see it and as raw payloads carry it."""
        heads = self.num_layers * self.page_size * self.num_kv_heads
        elements = heads * (self.key_dim + self.value_dim) * DTYPE_BYTES[self.dtype]
        return elements + (heads * 2 * 4 if self.scaled else 0)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)
