"""SplitZip on CUDA: the host's part of a payload. gpu_launch.py has the device's.

Nothing waits for the device between the launches of an encoding. Its sizes are known when all is done; then the
escapes, which are few, are fetched.
"""

from collections.abc import Sequence

import torch

from kvrail.codec.base import EncodingStats, PagedBlock, Payload
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.gpu import byte_pools, copy_stream, record, wait_for
from kvrail.codec.core.host import host_memory, to_device
from kvrail.codec.core.sections import HEADER_BYTES, aligned
from kvrail.codec.splitzip.one_stage.gpu_launch import launch_decode, launch_encode
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.gpu_launch import EncodeBuffers, Plans, make_table, parts_of, tiles_of
from kvrail.codec.splitzip.tiles.payload import Layout, Part, scale_bytes_of, stats_of
from kvrail.codec.splitzip.tiles.plan import TensorPlan

ESCAPE_SHARE = 16
"""One in this many of a tensor's bytes is room for its escapes in the memory that a payload gets first: more than KV
needs, and less than doubles the memory, which is rounded up to a power of two."""


class GpuEncoding:
    """An encoding under way on the current stream.

    Its dense parts come to the host at once, its escapes when `stages` knows how many there are. The host's memory is
    pinned and torch's: it is used again only once this object and every view of its payload are gone.
    """

    def __init__(self, pages: PagedBlock, plans: Plans, table: torch.Tensor, buffers: EncodeBuffers) -> None:
        """Bring to the host what the work that has been launched leaves in `buffers`. table: as of make_table."""
        self._pages, self._plans, self._table = pages, plans, table
        fixed = sum(plan.fixed_bytes if tiles_of(plan) else aligned(plan.raw_bytes) for plan in plans)
        room = HEADER_BYTES + fixed + aligned(scale_bytes_of(pages.spec)) + _escape_room(plans)
        self._host = host_memory(room, pages.device)
        self._totals = torch.empty((2, 2), dtype=torch.int64, pin_memory=pages.device.type == "cuda")
        self._buffers: EncodeBuffers | None = buffers
        self._copy(buffers.body, HEADER_BYTES)
        self._totals.copy_(buffers.totals, non_blocking=True)
        self._event = record(pages.device)
        self._parts: Sequence[Part] = ()
        self._size = 0

    def stages(self) -> list[Payload]:
        """Wait for the work, bring the escapes and give the one payload."""
        if not self._parts:
            wait_for(self._event)
            self._finish()
            self._buffers = None
        return [self._host.numpy().data[: self._size]]

    def stats(self) -> EncodingStats:
        """What it came to; after `stages`."""
        return stats_of(self._parts)

    def _finish(self) -> None:
        """Complete the payload in the host's memory; the device has finished all but these last copies."""
        parts = parts_of(self._plans, self._totals)
        layout = Layout(parts, scale_bytes_of(self._pages.spec))
        again = any(part.raw for part in layout.parts) or layout.size > self._host.numel()
        if layout.size > self._host.numel():
            self._host = host_memory(layout.size, self._pages.device)
        with torch.cuda.stream(copy_stream(self._pages.device)):
            if again:
                self._copy_dense(layout)
            self._copy_escapes(layout)
            event = record(self._pages.device)
        wait_for(event)
        layout.complete(self._host.numpy())
        self._parts, self._size = parts, layout.size

    def _copy_dense(self, layout: Layout) -> None:
        """Copy dense parts and scales again: a tensor that travels raw moves what follows, as does larger memory."""
        assert self._buffers is not None
        index = self._table[: len(self._pages.page_ids)]
        pools, dense = byte_pools(self._pages), self._buffers.dense(self._plans)
        for part, pool, coded, offset in zip(layout.parts, pools, dense, layout.offsets, strict=False):
            self._copy(pool.index_select(1, index).flatten() if part.raw else coded, offset)
        self._copy(self._buffers.scales(self._plans), layout.scale_offset)

    def _copy_escapes(self, layout: Layout) -> None:
        assert self._buffers is not None
        for part, slots, offset in zip(layout.parts, self._buffers.slots, layout.streams, strict=True):
            self._copy(slots.packed_records[: part.records].view(torch.uint8), offset)
            self._copy(slots.packed_extensions[: part.extensions], offset + aligned(2 * part.records))

    def _copy(self, source: torch.Tensor, offset: int) -> None:
        self._host[offset : offset + source.numel()].copy_(source, non_blocking=True)


def _escape_room(plans: Sequence[TensorPlan]) -> int:
    """Bytes that a payload's memory has for the escapes of tensors that are coded, unless they turn out to be more."""
    return sum(aligned(plan.raw_bytes // ESCAPE_SHARE) for plan in plans if tiles_of(plan))


def encode(pages: PagedBlock, coding: Coding) -> GpuEncoding:
    """Launch the encoding of keys and values on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    plans, table = coding.plans, make_table(pages, coding.tops)
    buffers = EncodeBuffers.allocate(plans, scale_bytes_of(pages.spec), pages.device)
    launch_encode(pages, plans, table, buffers)
    return GpuEncoding(pages, plans, table, buffers)


def decode(stage: int, payloads: Sequence[Bytes], layouts: Sequence[Layout], coding: Coding, out: PagedBlock) -> None:
    """Write the one payload into `out` on the current stream; every record must lie on a value.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    (payload,), (layout,) = payloads, layouts
    byte_pools(out)
    launch_decode(to_device(payload, out.device), layout, make_table(out, coding.tops), out)
