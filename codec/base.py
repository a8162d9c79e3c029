"""What every codec is: KV blocks to an ordered list of stages, and back.

The first stage is enough to draft on, the last stage is the truth. The engine, the transport and the verifier know
stages and nothing else of a codec.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class CodecError(Exception):
    """A payload is corrupt, truncated or does not fit its block."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Shape and element type of a block: whole pages of some layers.

    dtype: torch's name of the element type, such as "bfloat16".
    """

    dtype: str
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaled: bool

    @property
    def raw_bytes(self) -> int:
        """Bytes of the block's tensors, uncompressed."""
        heads = self.num_layers * self.num_pages * self.page_size * self.num_kv_heads
        item = torch.empty((), dtype=getattr(torch, self.dtype)).element_size()
        return heads * ((self.key_dim + self.value_dim) * item + (8 if self.scaled else 0))


@dataclass(frozen=True, slots=True)
class Block:
    """KV of some pages of some layers, contiguous.

    keys: [layers, pages, page_size, kv_heads, key_dim]; values: [..., value_dim]; scales, where the element type has
    eight bits: float32 [layers, pages, page_size, kv_heads], else None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def spec(self) -> BlockSpec:
        """The block's shape and element type."""
        layers, pages, page_size, heads, key_dim = self.keys.shape
        dtype = str(self.keys.dtype).removeprefix("torch.")
        return BlockSpec(
            dtype, layers, pages, page_size, heads, key_dim, self.values.shape[-1], self.key_scales is not None
        )

    def tensors(self) -> list[torch.Tensor]:
        """Keys, values and, where there are any, their scales, in the order in which payloads carry them."""
        return [t for t in (self.keys, self.values, self.key_scales, self.value_scales) if t is not None]


class Encoding(Protocol):
    """A block on its way to bytes: the work has been launched, perhaps on a CUDA stream."""

    def stages(self) -> list[memoryview]:
        """Wait for the work and return one host payload a stage."""


class Codec(Protocol):
    """Blocks to stages and back. One conformance suite (tests/codec) holds for all of them."""

    name: str
    num_stages: int
    exact: bool  # whether the last stage restores every bit
    dtypes: frozenset[str]  # element types that it takes

    def encode(self, block: Block) -> Encoding:
        """Launch the encoding of `block` on its device's current stream."""

    def decode(self, stage: int, payload: memoryview, out: Block) -> None:
        """Write stage `stage` into `out`, on its device's current stream.

        Stages of a block arrive in order. Raises CodecError, with `out` untouched, where the payload does not fit.
        """
