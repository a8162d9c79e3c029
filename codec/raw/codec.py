"""Raw: a block's bytes as they are, in one exact stage. README.md has the layout."""

import numpy as np
import numpy.typing as npt
import torch

from codec.base import Block, CodecError, Encoding
from codec.frame import ITEM_BYTES


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes, uint8 [n]; raises CodecError where it is not contiguous."""
    if not tensor.is_contiguous():
        raise CodecError(f"a block's tensor of shape {tuple(tensor.shape)} is not contiguous; make it so first")
    return tensor.view(-1).view(torch.uint8)


class RawEncoding:
    """A copy under way into one host buffer.

    On CUDA the buffer is pinned and comes from torch's caching host allocator: it is used again only once this object
    and every view of its payload are gone and the copies into it have finished.
    """

    def __init__(self, block: Block) -> None:
        parts = [_as_bytes(tensor) for tensor in block.tensors()]
        on_cuda = block.keys.is_cuda
        self._buffer = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, pin_memory=on_cuda)
        for part, target in zip(parts, self._buffer.split_with_sizes([part.numel() for part in parts]), strict=True):
            target.copy_(part, non_blocking=on_cuda)
        self._parts: list[torch.Tensor] = []
        self._event: torch.cuda.Event | None = None
        if on_cuda:
            self._parts = parts  # a copy may still read them
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(block.keys.device))

    def stages(self) -> list[memoryview]:
        """Wait for the copies; one payload, a view of the buffer."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
            self._parts = []
        return [self._buffer.numpy().data]


class RawCodec:
    """Bytes as they are."""

    def __init__(self) -> None:
        self.name = "raw"
        self.num_stages = 1
        self.exact = True
        self.dtypes = frozenset(ITEM_BYTES)

    def encode(self, block: Block) -> Encoding:
        """Launch the copies of `block` to the host on its device's current stream."""
        if block.spec.dtype not in self.dtypes:
            raise CodecError(f"raw does not take dtype {block.spec.dtype}; it takes {', '.join(sorted(self.dtypes))}")
        return RawEncoding(block)

    def decode(self, stage: int, payload: memoryview, out: Block) -> None:
        """Write the payload into `out`; raises CodecError, with `out` untouched, where stage or size do not fit."""
        targets = [_as_bytes(tensor) for tensor in out.tensors()]
        sizes = [target.numel() for target in targets]
        if stage != 0:
            raise CodecError(f"raw has stage 0 alone, not {stage}")
        if payload.nbytes != sum(sizes):
            raise CodecError(f"a raw payload has {payload.nbytes} bytes; its block has {sum(sizes)}")
        source = np.frombuffer(payload, dtype=np.uint8)
        if out.keys.is_cuda:
            self._upload(source, targets)
            return
        for part, target in zip(np.split(source, np.cumsum(sizes)[:-1]), targets, strict=True):
            target.numpy()[:] = part

    @staticmethod
    def _upload(source: npt.NDArray[np.uint8], targets: list[torch.Tensor]) -> None:
        """Copy by way of pinned memory, which the host allocator keeps until the copies have run."""
        staging = torch.empty(source.size, dtype=torch.uint8, pin_memory=True)
        staging.numpy()[:] = source
        for part, target in zip(staging.split_with_sizes([t.numel() for t in targets]), targets, strict=True):
            target.copy_(part, non_blocking=True)
