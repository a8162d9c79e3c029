"""The two stages on CUDA: the host's part of the payloads. gpu_launch.py has the device's."""

import numpy as np
import torch

from codec.base import EncodingStats, PagedBlock
from codec.progressive.gpu_launch import (
    StageBuffers,
    later_bytes,
    launch_decode_anchor,
    launch_encode,
    launch_refine,
)
from codec.progressive.payload import HEADER_BYTES, AnchorPayload, RestPayload, anchor_payload
from codec.progressive.plan import Plans
from codec.splitzip.gpu import GpuEncoding, record, to_device
from codec.splitzip.gpu_launch import byte_pools, make_table
from codec.splitzip.payload import Bytes, pad_sections, scale_bytes_of


class StagesEncoding:
    """An encoding under way on the current stream: the second stage comes to the host behind the first.

    The host's memory is pinned and torch's: it is used again only once this object and every view of its payloads are
    gone.
    """

    def __init__(self, pages: PagedBlock, plans: Plans) -> None:
        table, scale_bytes = make_table(pages, (None, None)), scale_bytes_of(pages.spec)
        buffers = StageBuffers.allocate(plans, scale_bytes, pages.device)
        launch_encode(pages, plans, table, buffers)
        self._plans = plans
        self._anchor = GpuEncoding(
            pages, plans, table, buffers.anchor, lambda parts: anchor_payload(plans, parts, scale_bytes)
        )
        size, on_cuda = HEADER_BYTES + buffers.rest.numel(), pages.device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        self._host[HEADER_BYTES:].copy_(buffers.rest, non_blocking=True)
        self._event = record(pages.device)
        self._rest: RestPayload | None = None

    def stages(self) -> list[memoryview]:
        """Wait for the work and give both payloads."""
        (first,) = self._anchor.stages()
        if self._rest is None:
            if self._event is not None:
                self._event.synchronize()
            self._rest = self._finish()
        return [first, self._host.numpy().data[: self._rest.size]]

    def stats(self) -> EncodingStats:
        """What it came to; after `stages`."""
        return self._anchor.stats()

    def _finish(self) -> RestPayload:
        """Complete the second stage in the host's memory: header, gaps, and nothing of what travels raw."""
        raw = self._anchor.layout.keys.raw, self._anchor.layout.values.raw
        layout, host = RestPayload(self._plans, raw), self._host.numpy()
        host[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
        keys, values = later_bytes(self._plans)
        if raw[0] and not raw[1]:
            host[HEADER_BYTES : HEADER_BYTES + values] = host[HEADER_BYTES + keys : HEADER_BYTES + keys + values]
        for plan, whole, offset in zip(layout.rests, raw, layout.offsets, strict=True):
            if not whole:
                pad_sections(plan, host[offset:])
        return layout


def encode(pages: PagedBlock, plans: Plans) -> StagesEncoding:
    """Launch the encoding of keys and values by their plans on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    return StagesEncoding(pages, plans)


def decode_anchor(payload: Bytes, layout: AnchorPayload, out: PagedBlock) -> None:
    """Write a first stage into `out` on the current stream; every record must lie on a value.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    byte_pools(out)
    launch_decode_anchor(to_device(payload, out.device), layout, make_table(out, (None, None)), out)


def refine(payload: Bytes, layout: RestPayload, out: PagedBlock) -> None:
    """Write a second stage into `out`, which holds the first, on the current stream.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    byte_pools(out)
    launch_refine(to_device(payload, out.device), layout, make_table(out, (None, None)), out)
