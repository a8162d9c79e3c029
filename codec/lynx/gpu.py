"""Lynx on CUDA: the host's part of payloads. gpu_launch.py has the device's.

Nothing waits for the device between the launches of an encoding. How long the stream of stage EXACT is, is known when
all is done; then it is fetched.
"""

from collections.abc import Sequence

import numpy as np
import torch

from codec.base import EncodingStats, PagedBlock
from codec.lynx.gpu_launch import (
    ExactBuffers,
    Plans,
    launch_decode,
    launch_encode,
    launch_exact_decode,
    launch_exact_encode,
)
from codec.lynx.payload import (
    ANCHOR,
    EXACT,
    HEADER_BYTES,
    RESIDUAL,
    Bytes,
    Part,
    Payload,
    escapes_of,
    places_of,
    travels_raw,
)
from codec.lynx.plan import TensorPlan
from codec.splitzip.gpu_launch import byte_pools
from codec.splitzip.plan import aligned
from codec.streams import copy_stream, record


class GpuEncoding:
    """An encoding under way on the current stream.

    What has a fixed size comes to the host at once, EXACT when `stages` knows how long it is. The host's memory is
    pinned and torch's: it is used again only once this object and every view of its payloads are gone.
    """

    def __init__(self, pages: PagedBlock, plans: Plans, num_stages: int) -> None:
        self._pages, self._plans = pages, plans
        self._pools = byte_pools(pages)
        self._table = pages.page_index()
        parts = [(Part(plans[0], stage), Part(plans[1], stage)) for stage in (ANCHOR, RESIDUAL)]
        self._layouts = [Payload(stage, each, plans[0].code.id) for stage, each in enumerate(parts)]
        self._dense = [
            [torch.empty(plan.fixed_bytes[stage], dtype=torch.uint8, device=pages.device) for plan in plans]
            for stage in (ANCHOR, RESIDUAL)
        ]
        launch_encode(self._pools, self._table, plans, self._dense)
        for plan, pool, dense in zip(plans, self._pools, self._dense[ANCHOR], strict=True):
            if plan.raw:
                dense[: plan.raw_bytes] = pool.index_select(1, self._table).flatten()
        self._exact: list[ExactBuffers | None] = []
        if num_stages > EXACT:
            self._exact = [self._launch_exact(number) for number in range(2)]
        self._hosts = [self._fetch(layout, dense) for layout, dense in zip(self._layouts, self._dense, strict=True)]
        self._totals = torch.zeros((2, 2), dtype=torch.int64, pin_memory=pages.device.type == "cuda")
        for total, buffers in zip(self._totals, self._exact, strict=False):
            if buffers is not None:
                total.copy_(buffers.totals, non_blocking=True)
        self._event = record(pages.device)

    def stages(self) -> list[memoryview]:
        """Wait for the work and give one payload a stage."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        if self._exact:
            self._finish_exact()
        return [host.numpy().data[: layout.size] for host, layout in zip(self._hosts, self._layouts, strict=True)]

    def stats(self) -> EncodingStats:
        """What it came to; after `stages`."""
        parts = self._layouts[EXACT].parts if len(self._layouts) > EXACT else ()
        return EncodingStats(
            sum(plan.values for plan in self._plans),
            sum(part.escapes for part in parts),
            sum(plan.raw for plan in self._plans) + sum(part.raw for part in parts),
        )

    def _launch_exact(self, number: int) -> ExactBuffers | None:
        """Launch the last stage of keys (0) or values (1); None where it brings nothing of them."""
        plan = self._plans[number]
        if plan.raw:
            return None
        buffers = ExactBuffers.allocate(plan, self._pages.device)
        dense = [each[number] for each in self._dense]
        launch_exact_encode(self._pools[number], self._table, plan, dense, buffers)
        return buffers

    def _fetch(self, layout: Payload, dense: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start to copy what has a fixed place to the host."""
        host = torch.empty(layout.size, dtype=torch.uint8, pin_memory=self._pages.device.type == "cuda")
        host.numpy()[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
        for part, source, offset in zip(layout.parts, dense, layout.offsets, strict=True):
            ends = [where.end for where in part.plan.sections[part.stage].values()]
            starts = [where.offset for where in part.plan.sections[part.stage].values()]
            for start, end in zip(starts, ends, strict=True):
                host[offset + start : offset + end].copy_(source[start:end], non_blocking=True)
                host.numpy()[offset + end : offset + aligned(end)] = 0
        return host

    def _finish_exact(self) -> None:
        """Bring the last stage to the host; the device has finished all but these copies."""
        parts = []
        for plan, (words, escapes) in zip(self._plans, self._totals.tolist(), strict=True):
            raw = travels_raw(plan, words, escapes)
            parts.append(Part(plan, EXACT, raw=True) if raw else Part(plan, EXACT, words=words, escapes=escapes))
        layout = Payload(EXACT, (parts[0], parts[1]), self._plans[0].code.id)
        host = torch.zeros(layout.size, dtype=torch.uint8, pin_memory=self._pages.device.type == "cuda")
        with torch.cuda.stream(copy_stream(self._pages.device)):
            for number, part in enumerate(parts):
                self._copy_exact(number, part, host[layout.offsets[number] :], host[layout.streams[number] :])
            event = record(self._pages.device)
        if event is not None:
            event.synchronize()
        host.numpy()[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
        for number, part in enumerate(parts):
            _sort_escapes(host.numpy()[layout.streams[number] :], part)
        self._layouts.append(layout)
        self._hosts.append(host)
        self._exact = []

    def _copy_exact(self, number: int, part: Part, fixed: torch.Tensor, stream: torch.Tensor) -> None:
        """Start to copy one tensor's share of the last stage."""
        plan, buffers = part.plan, self._exact[number]
        if part.raw:
            elements = self._pools[number].index_select(1, self._table).flatten()
            fixed[: plan.raw_bytes].copy_(elements, non_blocking=True)
        elif buffers is not None:
            for where in plan.sections[EXACT].values():
                fixed[where.offset : where.end].copy_(buffers.dense[where.offset : where.end], non_blocking=True)
            stream[: 4 * part.words].copy_(buffers.words[: part.words].view(torch.uint8), non_blocking=True)
            elements_at = aligned(4 * part.words) + aligned(4 * part.escapes)
            positions = buffers.positions[: part.escapes]
            stream[aligned(4 * part.words) :][: 4 * part.escapes].copy_(positions.view(torch.uint8), non_blocking=True)
            item = plan.format.item_bytes
            narrow = buffers.elements[: part.escapes].view(torch.uint8).view(-1, 4)[:, :item].flatten()
            stream[elements_at:][: item * part.escapes].copy_(narrow, non_blocking=True)


def encode(pages: PagedBlock, plans: Plans, num_stages: int) -> GpuEncoding:
    """Launch the encoding of keys and values into the first `num_stages` stages, on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    return GpuEncoding(pages, plans, num_stages)


def decode(payloads: Sequence[Bytes], layouts: Sequence[Payload], out: PagedBlock) -> None:
    """Write into `out`, on the current stream, what the payloads of ANCHOR, or of ANCHOR and RESIDUAL, code.

    Raw tensors are written where it is ANCHOR. Raises CodecError where the rows of a page are not contiguous.
    """
    pools, table = byte_pools(out), out.page_index()
    fixed = [_fixed(_uploaded(each, out.device), layout) for each, layout in zip(payloads, layouts, strict=True)]
    plans = [part.plan for part in layouts[ANCHOR].parts]
    for plan, pool, dense in zip(plans, pools, fixed[ANCHOR], strict=True):
        if plan.raw and len(payloads) == 1:
            _put_raw(pool, table, dense, plan)
    launch_decode(pools, table, plans, fixed)


def decode_exact(payload: Bytes, layout: Payload, out: PagedBlock) -> None:
    """Correct by EXACT what RESIDUAL left in `out`, on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    pools, table = byte_pools(out), out.page_index()
    source = _uploaded(payload, out.device)
    tensors = zip(layout.parts, pools, _fixed(source, layout), layout.streams, strict=True)
    for part, pool, dense, stream in tensors:
        if part.raw:
            _put_raw(pool, table, dense, part.plan)
        elif not part.plan.raw:
            words = source[stream:][: 4 * part.words].view(torch.int32)
            launch_exact_decode(pool, table, part.plan, dense, words)
            _put_escapes(payload[stream:], part, pool, out)


def _fixed(source: torch.Tensor, layout: Payload) -> list[torch.Tensor]:
    """The fixed sections of keys and of values."""
    return [source[start:][: part.fixed_bytes] for part, start in zip(layout.parts, layout.offsets, strict=True)]


def _put_raw(pool: torch.Tensor, table: torch.Tensor, elements: torch.Tensor, plan: TensorPlan) -> None:
    """Write a tensor that travels as it is."""
    pool.index_copy_(1, table, elements[: plan.raw_bytes].view(pool.shape[0], -1, pool.shape[2]))


def _put_escapes(stream: Bytes, part: Part, pool: torch.Tensor, out: PagedBlock) -> None:
    """Write escapes to their places."""
    if not part.escapes:
        return
    plan, (positions, elements) = part.plan, escapes_of(stream, part)
    page, row, column = places_of(positions, plan)
    ids = np.array(out.page_ids, dtype=np.int64)[page % plan.num_pages]
    where = [page // plan.num_pages, ids, row * plan.columns + column]
    item = torch.int32 if plan.format.item_bytes == 4 else torch.int16
    values = _uploaded(elements.view(np.uint8), out.device).view(item)
    pool.view(item).index_put_([_uploaded(each, out.device) for each in where], values)


def _sort_escapes(stream: Bytes, part: Part) -> None:
    """Put escapes, which the device found in any order, into that of their positions."""
    positions, elements = escapes_of(stream, part)
    order = np.argsort(positions)
    positions[:], elements[:] = positions[order], elements[order]


def _uploaded(array: np.ndarray[tuple[int], np.dtype[np.generic]], device: torch.device) -> torch.Tensor:
    """A copy on the device, by way of pinned memory, on the current stream."""
    host = torch.empty(array.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.numpy()[:] = array.view(np.uint8)
    found = host.to(device, non_blocking=True)
    return found.view(torch.int64) if array.dtype == np.int64 else found
