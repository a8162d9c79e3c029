"""Raw: a block's bytes as they are, in one exact stage. README.md has the layout."""

from collections.abc import Sequence

import torch

from kvrail.codec.base import CodecError, Encoding, EncodingStats, PagedBlock, Payload
from kvrail.codec.core.backend import CheckedCodec, backend_of
from kvrail.codec.core.floats import FLOATS
from kvrail.codec.core.gpu import record, wait_for
from kvrail.codec.core.host import host_bytes, host_memory, to_device

_PACKAGE = "kvrail.codec.raw"


class RawEncoding:
    """A copy under way into one buffer: on the pages' device, or by way of it into host memory.

    Host memory is pinned where the pages lie on CUDA, and torch's: it is used again only once this object and every
    view of its payload are gone and the copies into it have finished.
    """

    def __init__(self, pages: PagedBlock, on_device: bool) -> None:
        spec = pages.spec
        heads = spec.num_layers * spec.num_pages * spec.page_size * spec.num_kv_heads
        self._values = heads * (spec.key_dim + spec.value_dim)
        self._buffer = torch.empty(spec.raw_bytes, dtype=torch.uint8, device=pages.device)
        backend_of(_PACKAGE, pages.device).gather(pages, self._buffer)
        if self._buffer.is_cuda and not on_device:
            self._buffer = host_memory(spec.raw_bytes, pages.device).copy_(self._buffer, non_blocking=True)
        self._event = record(pages.device)

    def stages(self) -> list[Payload]:
        """Wait for the copies; one payload: the buffer, or where it is the host's a view of it."""
        wait_for(self._event)
        return [self._buffer if self._buffer.is_cuda else self._buffer.numpy().data]

    def stats(self) -> EncodingStats:
        """Both tensors travel as they are."""
        return EncodingStats(self._values, raw_tensors=2)


class RawCodec(CheckedCodec):
    """Bytes as they are: copies to the host, or to a buffer beside the pages."""

    name = "raw"
    dtypes = frozenset(FLOATS)
    device_payloads = True

    def _encode(self, pages: PagedBlock, on_device: bool) -> Encoding:
        return RawEncoding(pages, on_device)

    def _decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        (payload,) = payloads
        if payload.nbytes != out.spec.raw_bytes:
            raise CodecError(f"a raw payload has {payload.nbytes} bytes; its block has {out.spec.raw_bytes}")
        backend = backend_of(_PACKAGE, out.device)
        if isinstance(payload, torch.Tensor):
            if (
                not payload.is_cuda
                or payload.device != out.device
                or payload.dtype != torch.uint8
                or not payload.is_contiguous()
            ):
                raise CodecError(
                    f"a raw payload is a tensor of {payload.dtype} on {payload.device}; pages on {out.device} take"
                    " contiguous bytes in host memory or on the same CUDA device"
                )
            backend.scatter(payload.flatten(), out)
        elif out.device.type == "cuda":
            backend.check_pools(out)
            backend.scatter(to_device(host_bytes(self.name, payload), out.device), out)
        else:
            backend.scatter(host_bytes(self.name, payload), out)
