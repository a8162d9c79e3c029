"""The two stages on CUDA: the host's part of the payloads. gpu_launch.py has the device's."""

import functools
from collections.abc import Sequence

import numpy as np
import torch

from kvrail.codec.base import EncodingStats, PagedBlock, Payload
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.gpu import byte_pools
from kvrail.codec.core.host import host_memory, to_device
from kvrail.codec.core.sections import aligned, pad
from kvrail.codec.core.streams import copy_stream, record
from kvrail.codec.splitzip.progressive.gpu_launch import (
    StageBuffers,
    later_bytes,
    launch_decode_anchor,
    launch_decode_exact,
    launch_encode,
)
from kvrail.codec.splitzip.progressive.payload import StageLayout, layouts_of
from kvrail.codec.splitzip.progressive.plan import Plans
from kvrail.codec.splitzip.tiles.gpu import GpuEncoding, escape_room
from kvrail.codec.splitzip.tiles.gpu_launch import make_table
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES, Part, pad_sections, scale_bytes_of


class StagesEncoding:
    """An encoding under way on the current stream: the second stage comes to the host behind the first.

    The host's memory is pinned and torch's: it is used again only once this object and every view of its payloads are
    gone.
    """

    def __init__(self, pages: PagedBlock, plans: Plans) -> None:
        table, self._scale_bytes = make_table(pages, (None, None)), scale_bytes_of(pages.spec)
        buffers = StageBuffers.allocate(plans, self._scale_bytes, pages.device)
        launch_encode(pages, plans, table, buffers)
        self._plans, self._device = plans, pages.device
        anchor_layout = functools.partial(_anchor_layout, plans, self._scale_bytes)
        self._anchor = GpuEncoding(pages, plans, table, buffers.anchor, anchor_layout)
        self._host = host_memory(HEADER_BYTES + buffers.rest.numel() + escape_room(plans), pages.device)
        self._copy(buffers.rest, HEADER_BYTES)
        self._event = record(pages.device)
        self._buffers: StageBuffers | None = buffers
        self._size = 0

    def stages(self) -> list[Payload]:
        """Wait for the work, bring the escapes and give both payloads."""
        first = self._anchor.payload()
        if self._buffers is not None:
            if self._event is not None:
                self._event.synchronize()
            self._size = self._finish(self._buffers).size
            self._buffers = None
        return [first, self._host.numpy().data[: self._size]]

    def stats(self) -> EncodingStats:
        """What it came to; after `stages`."""
        return self._anchor.stats()

    def _finish(self, buffers: StageBuffers) -> StageLayout:
        """Complete the second stage in the host's memory: escapes, header, gaps, and nothing of what travels raw."""
        layout = layouts_of(self._plans, self._anchor.parts, self._scale_bytes)[1]
        keys, _ = later_bytes(self._plans)
        rests = buffers.rest[:keys], buffers.rest[keys:]
        anew = layout.size > self._host.numel() or (layout.keys.raw and keys > 0)
        if layout.size > self._host.numel():
            self._host = host_memory(layout.size, self._device)
        with torch.cuda.stream(copy_stream(self._device)):
            for number, (part, slots) in enumerate(zip(layout.parts, buffers.anchor.slots, strict=True)):
                if anew and not part.raw:
                    self._copy(rests[number], layout.dense_offsets[number])
                offset = layout.escape_offsets[number]
                self._copy(slots.packed_records[: part.records].view(torch.uint8), offset)
                self._copy(slots.packed_extensions[: part.extensions], offset + aligned(2 * part.records))
            event = record(self._device)
        if event is not None:
            event.synchronize()
        host = self._host.numpy()
        host[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
        for part, dense, offset in zip(layout.parts, layout.dense_offsets, layout.escape_offsets, strict=True):
            if not part.raw:
                pad_sections(part.plan, host[dense:])
                pad(host, pad(host, offset + 2 * part.records) + part.extensions)
        return layout

    def _copy(self, source: torch.Tensor, offset: int) -> None:
        self._host[offset : offset + source.numel()].copy_(source, non_blocking=True)


def _anchor_layout(plans: Plans, scale_bytes: int, parts: list[Part]) -> StageLayout:
    """The first stage's layout, given what became of keys and values."""
    return layouts_of(plans, parts, scale_bytes)[0]


def encode(pages: PagedBlock, plans: Plans) -> StagesEncoding:
    """Launch the encoding of keys and values by their plans on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    return StagesEncoding(pages, plans)


def decode(
    stage: int, payloads: Sequence[Bytes], layouts: Sequence[StageLayout], plans: Plans, out: PagedBlock
) -> None:
    """Write a stage into `out` on the current stream. Raises CodecError, with `out` untouched, where it cannot."""
    if stage == 0:
        decode_anchor(payloads[0], layouts[0], out)
    else:
        decode_exact(payloads, layouts, out)


def decode_anchor(payload: Bytes, layout: StageLayout, out: PagedBlock) -> None:
    """Write a first stage into `out` on the current stream.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    byte_pools(out)
    launch_decode_anchor(to_device(payload, out.device), layout, make_table(out, (None, None)), out)


def decode_exact(payloads: Sequence[Bytes], layouts: Sequence[StageLayout], out: PagedBlock) -> None:
    """Write what both stages code into `out` on the current stream; every record must lie on a value.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    byte_pools(out)
    sources = [to_device(payload, out.device) for payload in payloads]
    launch_decode_exact(sources, layouts, make_table(out, (None, None)), out)
