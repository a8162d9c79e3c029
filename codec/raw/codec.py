"""Raw: a block's bytes as they are, in one exact stage. README.md has the layout."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from codec.base import BlockSpec, CodecError, Encoding, EncodingStats, PagedBlock, check_stage
from codec.frame import ITEM_BYTES
from codec.streams import record


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a pool's tensor as uint8, its last dimension widened; raises CodecError where it is not contiguous."""
    if not tensor.is_contiguous():
        raise CodecError(f"a pool's tensor of shape {tuple(tensor.shape)} is not contiguous; make it so first")
    return (tensor if tensor.dim() == 5 else tensor.unsqueeze(-1)).view(torch.uint8)


def _split(buffer: torch.Tensor, pools: list[torch.Tensor], num_pages: int) -> list[torch.Tensor]:
    """A contiguous buffer, uint8 [n], as the pages of each pool: [layers, pages, page_size, kv_heads, bytes]."""
    shapes = [(pool.shape[0], num_pages, *pool.shape[2:]) for pool in pools]
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(buffer.split_with_sizes(sizes), shapes, strict=True)]


def _values_of(spec: BlockSpec) -> int:
    """Elements of keys and values."""
    return spec.num_layers * spec.num_pages * spec.page_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim)


class RawEncoding:
    """A copy under way into one host buffer.

    On CUDA the buffer is pinned and comes from torch's caching host allocator: it is used again only once this object
    and every view of its payload are gone and the copies into it have finished.
    """

    def __init__(self, pages: PagedBlock) -> None:
        pools = [_as_bytes(pool) for pool in pages.layer_pools()]
        spec, on_cuda = pages.spec, pages.device.type == "cuda"
        self._values = _values_of(spec)
        self._buffer = torch.empty(spec.raw_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._parts: list[torch.Tensor] = []
        index = pages.page_index()
        for pool, target in zip(pools, _split(self._buffer, pools, spec.num_pages), strict=True):
            if on_cuda:
                self._parts.append(pool.index_select(1, index))  # the copy may still read it
                target.copy_(self._parts[-1], non_blocking=True)
            else:
                torch.index_select(pool, 1, index, out=target)
        self._event = record(pages.device)

    def stages(self) -> list[memoryview]:
        """Wait for the copies; one payload, a view of the buffer."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
            self._parts = []
        return [self._buffer.numpy().data]

    def stats(self) -> EncodingStats:
        """Both tensors travel as they are."""
        return EncodingStats(self._values, raw_tensors=2)


class RawCodec:
    """Bytes as they are."""

    def __init__(self) -> None:
        self.name = "raw"
        self.num_stages = 1
        self.exact = True
        self.dtypes = frozenset(ITEM_BYTES)
        self.parameters_id = 0

    def encode(self, pages: PagedBlock) -> Encoding:
        """Launch the copies of `pages` to the host on their device's current stream."""
        dtype = pages.spec.dtype
        if dtype not in self.dtypes:
            raise CodecError(f"raw does not take dtype {dtype}; it takes {', '.join(sorted(self.dtypes))}")
        return RawEncoding(pages)

    def decode(self, stage: int, payloads: Sequence[memoryview], out: PagedBlock) -> None:
        """Write the one payload into `out`; raises CodecError, with `out` untouched, where it does not fit."""
        check_stage(self, stage, payloads)
        (payload,) = payloads
        pools = [_as_bytes(pool) for pool in out.layer_pools()]
        spec = out.spec
        if payload.nbytes != spec.raw_bytes:
            raise CodecError(f"a raw payload has {payload.nbytes} bytes; its block has {spec.raw_bytes}")
        source = np.frombuffer(payload, dtype=np.uint8)
        if out.device.type == "cuda":
            _upload(source, pools, out)
            return
        offset = 0
        for pool in pools:
            page_bytes = math.prod(pool.shape[2:])
            for layer, page in itertools.product(range(spec.num_layers), out.page_ids):
                pool[layer, page].numpy().reshape(-1)[:] = source[offset : offset + page_bytes]
                offset += page_bytes


def _upload(source: np.ndarray[tuple[int], np.dtype[np.uint8]], pools: list[torch.Tensor], out: PagedBlock) -> None:
    """Copy by way of pinned memory, which the host allocator keeps until the copies have run."""
    staging = torch.empty(source.size, dtype=torch.uint8, pin_memory=True)
    staging.numpy()[:] = source
    index = out.page_index()
    for pool, part in zip(pools, _split(staging, pools, len(out.page_ids)), strict=True):
        pool.index_copy_(1, index, part.to(pool.device, non_blocking=True))
