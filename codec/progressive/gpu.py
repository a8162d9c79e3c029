"""The two stages on CUDA: the host's part of the payloads. gpu_launch.py has the device's."""

import numpy as np
import torch

from codec.base import EncodingStats, PagedBlock
from codec.progressive.gpu_launch import (
    StageBuffers,
    later_bytes,
    launch_decode_anchor,
    launch_decode_exact,
    launch_encode,
)
from codec.progressive.payload import HEADER_BYTES, AnchorPayload, RestPayload, layouts_of
from codec.progressive.plan import Plans
from codec.splitzip.gpu import GpuEncoding, to_device
from codec.splitzip.gpu_launch import byte_pools, make_table, tiles_of
from codec.splitzip.payload import Bytes, Part, pad, pad_sections, scale_bytes_of, stats_of
from codec.splitzip.plan import aligned
from codec.streams import copy_stream, record


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
        self._anchor = GpuEncoding(pages, plans, table, buffers.anchor, self._anchor_layout)
        rooms = sum(plan.raw_bytes - plan.fixed_bytes for plan in plans if tiles_of(plan))
        self._host = torch.empty(HEADER_BYTES + rooms, dtype=torch.uint8, pin_memory=pages.device.type == "cuda")
        self._copy(buffers.rest, HEADER_BYTES)
        self._event = record(pages.device)
        self._buffers: StageBuffers | None = buffers
        self._parts: list[Part] = []
        self._rest: RestPayload | None = None

    def stages(self) -> list[memoryview]:
        """Wait for the work, bring the escapes and give both payloads."""
        (first,) = self._anchor.stages()
        if self._rest is None:
            if self._event is not None:
                self._event.synchronize()
            self._rest = self._finish()
            self._buffers = None
        return [first, self._host.numpy().data[: self._rest.size]]

    def stats(self) -> EncodingStats:
        """What it came to; after `stages`."""
        return stats_of(self._parts)

    def _anchor_layout(self, parts: list[Part]) -> AnchorPayload:
        """The first stage's layout, given what became of keys and values."""
        self._parts = parts
        return layouts_of(self._plans, parts, self._scale_bytes)[0]

    def _finish(self) -> RestPayload:
        """Complete the second stage in the host's memory: escapes, header, gaps, and nothing of what travels raw."""
        assert self._buffers is not None
        layout, host = layouts_of(self._plans, self._parts, self._scale_bytes)[1], self._host.numpy()
        keys, values = later_bytes(self._plans)
        if layout.keys.raw and not layout.values.raw:
            host[HEADER_BYTES : HEADER_BYTES + values] = host[HEADER_BYTES + keys : HEADER_BYTES + keys + values]
        with torch.cuda.stream(copy_stream(self._device)):
            for part, slots, offset in zip(
                layout.parts, self._buffers.anchor.slots, layout.escape_offsets, strict=True
            ):
                self._copy(slots.packed_records[: part.records].view(torch.uint8), offset)
                self._copy(slots.packed_extensions[: part.extensions], offset + aligned(2 * part.records))
            event = record(self._device)
        if event is not None:
            event.synchronize()
        host[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
        for part, dense, offset in zip(layout.parts, layout.dense_offsets, layout.escape_offsets, strict=True):
            if not part.raw:
                pad_sections(part.plan, host[dense:])
                pad(host, pad(host, offset + 2 * part.records) + part.extensions)
        return layout

    def _copy(self, source: torch.Tensor, offset: int) -> None:
        self._host[offset : offset + source.numel()].copy_(source, non_blocking=True)


def encode(pages: PagedBlock, plans: Plans) -> StagesEncoding:
    """Launch the encoding of keys and values by their plans on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    return StagesEncoding(pages, plans)


def decode_anchor(payload: Bytes, layout: AnchorPayload, out: PagedBlock) -> None:
    """Write a first stage into `out` on the current stream.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    byte_pools(out)
    launch_decode_anchor(to_device(payload, out.device), layout, make_table(out, (None, None)), out)


def decode_exact(payloads: tuple[Bytes, Bytes], layouts: tuple[AnchorPayload, RestPayload], out: PagedBlock) -> None:
    """Write what both stages code into `out` on the current stream; every record must lie on a value.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    byte_pools(out)
    sources = [to_device(payload, out.device) for payload in payloads]
    launch_decode_exact(sources, layouts, make_table(out, (None, None)), out)
