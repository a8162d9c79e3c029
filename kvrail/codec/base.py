"""What every codec is: KV blocks to an ordered list of stages, and back.

The first stage is enough to draft on, the last stage is the truth. The engine, the transport and the verifier know
stages and nothing else of a codec.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

Payload = memoryview | torch.Tensor
"""One stage of a block as bytes, contiguous: in host memory, or uint8 [n] on a CUDA device."""


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
        item: int = getattr(torch, self.dtype).itemsize
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


@dataclass(frozen=True, slots=True)
class PagedBlock:
    """Some pages of some layers of a pool, where they lie: what codecs read from and write into.

    pools: a block of all layers and all pages of the pool; page_ids: which pages, in order, none twice; index: the
    same, int64 [pages] on the pool's device, where the caller has it there. Raises ValueError where a layer or
    a page is not the pool's.
    """

    pools: Block
    layers: range
    page_ids: Sequence[int]
    index: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_layers, num_pages = self.pools.keys.shape[:2]
        if self.layers.step != 1 or not 0 <= self.layers.start <= self.layers.stop <= num_layers:
            raise ValueError(f"layers {self.layers} are not a run of the pool's {num_layers}")
        if self.page_ids and not 0 <= min(self.page_ids) <= max(self.page_ids) < num_pages:
            page = next(page for page in self.page_ids if not 0 <= page < num_pages)
            raise ValueError(f"page {page} is outside the pool of {num_pages} pages")

    @classmethod
    def whole(cls, block: Block) -> "PagedBlock":
        """All of a block."""
        layers, pages = block.keys.shape[:2]
        return cls(block, range(layers), range(pages))

    @property
    def spec(self) -> BlockSpec:
        """Shape and element type of the pages chosen."""
        return replace(self.pools.spec, num_layers=len(self.layers), num_pages=len(self.page_ids))

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self.pools.keys.device

    def page_index(self) -> torch.Tensor:
        """The page ids, int64 [pages], on the pool's device; on CUDA the copy runs on the current stream."""
        if self.index is not None:
            return self.index
        index = torch.tensor(self.page_ids, dtype=torch.int64)
        return index.pin_memory().to(self.device, non_blocking=True) if self.pools.keys.is_cuda else index

    def layer_pools(self) -> list[torch.Tensor]:
        """Views of the pool's tensors, in payload order, cut to the layers chosen."""
        return [pool[self.layers.start : self.layers.stop] for pool in self.pools.tensors()]

    def gather(self) -> Block:
        """A contiguous copy, made on the device's current stream."""
        index = self.page_index()
        return Block(*(_as_bytes(p).index_select(1, index).view(p.dtype) for p in self.layer_pools()))

    def scatter(self, block: Block) -> None:
        """Write a block of the same spec into the pages, on the device's current stream."""
        if block.spec != self.spec:
            raise ValueError(f"a block {block.spec} does not fit pages {self.spec}")
        index = self.page_index()
        for pool, tensor in zip(self.layer_pools(), block.tensors(), strict=True):
            _as_bytes(pool).index_copy_(1, index, _as_bytes(tensor))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Eight-bit floats as uint8: indexing kernels do not know them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@dataclass(frozen=True, slots=True)
class EncodingStats:
    """What an encoding came to.

    values: elements of keys and values; escapes: those that no code covered; raw_tensors: of keys and values, how many
    travel as they are because the code would not have made them smaller.
    """

    values: int
    escapes: int = 0
    raw_tensors: int = 0


class Encoding(Protocol):
    """Pages on their way to bytes: the work has been launched, perhaps on a CUDA stream.

    The pages must stay as they are until `stages` has returned.
    """

    def stages(self) -> list[Payload]:
        """Wait for the work and return one payload a stage, complete: it can be sent at once, from any stream.

        In host memory, pinned where the device wrote it; or on the pages' device where that was asked for. It stays as
        it is as long as something refers to it.
        """
        ...

    def stats(self) -> EncodingStats:
        """What it came to; after `stages`."""
        ...


class Codec(Protocol):
    """Pages to stages and back. One conformance suite (tests/codec) holds for all of them.

    Made once; any thread may use it. A codec that inherits from this states what differs from one exact stage.
    """

    name: str
    num_stages: int = 1
    exact: bool = True  # whether the last stage restores every bit
    dtypes: frozenset[str]  # element types that it takes
    parameters_id: int = 0  # 64 bits that must be equal at both ends; 0 where nothing but the name matters
    device_payloads: bool = False  # whether payloads may lie on a CUDA device, at either end
    reads_earlier_payloads: bool = False  # whether a stage is decoded from the payloads of those before it, too

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the encoding of `pages` on their device's current stream.

        on_device: payloads stay on the pages' CUDA device. Raises ValueError where the codec has no `device_payloads`
        or the pages lie on a CPU.
        """
        ...

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Have `out` hold stage `stage`, on its device's current stream.

        payloads: of all stages up to this one, 0 to `stage`; where the codec has no `reads_earlier_payloads`, of this
        one alone will do, and it relies on what the others left in `out`. They are complete, in pinned or pageable host
        memory, or on the device of `out` where the codec has `device_payloads`. Stages of a block arrive in order.
        Payloads must stay as they are until the work that this enqueued on the current stream is done: pinned memory is
        read by that work, and only what is pageable is copied before this returns. On a CPU all is done when it
        returns.
        Raises CodecError, with `out` untouched, where a payload does not fit or lies where this codec takes none, or
        there is one too many or too few.
        """


def check_stage(codec: Codec, stage: int, payloads: Sequence[Payload]) -> None:
    """Raise CodecError where a codec has no such stage, or the payloads are not those that it is decoded from."""
    if not 0 <= stage < codec.num_stages:
        known = "stage 0 alone" if codec.num_stages == 1 else f"stages 0 to {codec.num_stages - 1}"
        raise CodecError(f"{codec.name} has {known}, not {stage}")
    if len(payloads) != stage + 1 and (codec.reads_earlier_payloads or len(payloads) != 1):
        raise CodecError(
            f"stage {stage} of {codec.name} is decoded from the payloads of stages 0 to {stage}: {stage + 1}, not"
            f" {len(payloads)}"
        )
