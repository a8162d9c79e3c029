"""Lynx on CUDA: the host's part of payloads. gpu_launch.py has the device's.

Nothing waits for the device between the launches of an encoding. How long the stream of stage EXACT is, is known when
all is done; then it is fetched.
"""

from collections.abc import Sequence

import torch

from kvrail.codec.base import EncodingStats, PagedBlock, Payload
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.gpu import byte_pools, copy_stream, record, wait_for
from kvrail.codec.core.host import host_memory, to_device
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.papers.lynx.gpu_launch import (
    ExactBuffers,
    Plans,
    launch_decode,
    launch_encode,
    launch_exact_decode,
    launch_exact_encode,
)
from kvrail.codec.papers.lynx.payload import ANCHOR, EXACT, RESIDUAL, Layout, Part, travels_raw
from kvrail.codec.papers.lynx.plan import Coding


class GpuEncoding:
    """An encoding under way on the current stream.

    What has a fixed size comes to the host at once, EXACT when `stages` knows how long it is. The host's memory is
    pinned and torch's: it is used again only once this object and every view of its payloads are gone.
    """

    def __init__(self, pages: PagedBlock, plans: Plans, num_stages: int) -> None:
        self._pages, self._plans = pages, plans
        self._pools = byte_pools(pages)
        self._table = pages.page_index()
        parts = [(Part(plans[0], stage=stage), Part(plans[1], stage=stage)) for stage in (ANCHOR, RESIDUAL)]
        self._layouts = [Layout(each) for each in parts]
        sizes = [[plan.fixed_bytes[stage] for plan in plans] for stage in (ANCHOR, RESIDUAL)]
        self._bodies = [torch.empty(sum(each), dtype=torch.uint8, device=pages.device) for each in sizes]
        self._dense = [list(body.split_with_sizes(each)) for body, each in zip(self._bodies, sizes, strict=True)]
        launch_encode(self._pools, self._table, plans, self._dense)
        for plan, pool, dense in zip(plans, self._pools, self._dense[ANCHOR], strict=True):
            if plan.raw:
                dense[: plan.raw_bytes] = pool.index_select(1, self._table).flatten()
        self._exact: list[ExactBuffers | None] = []
        if num_stages > EXACT:
            self._exact = [self._launch_exact(number) for number in range(2)]
        self._hosts = [host_memory(layout.size, pages.device) for layout in self._layouts]
        for host, body in zip(self._hosts, self._bodies, strict=True):
            host[HEADER_BYTES:].copy_(body, non_blocking=True)
        self._totals = torch.zeros((2, 2), dtype=torch.int64, pin_memory=pages.device.type == "cuda")
        for total, buffers in zip(self._totals, self._exact, strict=False):
            if buffers is not None:
                total.copy_(buffers.totals, non_blocking=True)
        self._event = record(pages.device)

    def stages(self) -> list[Payload]:
        """Wait for the work and give one payload a stage."""
        if self._bodies:
            wait_for(self._event)
            if self._exact:
                self._finish_exact()
            for host, layout in zip(self._hosts, self._layouts, strict=True):
                layout.complete(host.numpy())
            self._bodies, self._dense, self._exact = [], [], []
        return [host.numpy().data for host in self._hosts]

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

    def _finish_exact(self) -> None:
        """Bring the last stage to the host; the device has finished all but these copies."""
        parts = []
        for plan, (words, escapes) in zip(self._plans, self._totals.tolist(), strict=True):
            raw = travels_raw(plan, words, escapes)
            words, escapes = (0, 0) if raw else (words, escapes)
            parts.append(Part(plan, raw, words, escapes, EXACT))
        layout = Layout((parts[0], parts[1]))
        host = host_memory(layout.size, self._pages.device)
        with torch.cuda.stream(copy_stream(self._pages.device)):
            for number, part in enumerate(parts):
                self._copy_exact(number, part, host[layout.offsets[number] :], host[layout.streams[number] :])
            event = record(self._pages.device)
        wait_for(event)
        self._layouts.append(layout)
        self._hosts.append(host)

    def _copy_exact(self, number: int, part: Part, fixed: torch.Tensor, stream: torch.Tensor) -> None:
        """Start to copy one tensor's share of the last stage, its escapes in the order of their positions."""
        plan, buffers = part.plan, self._exact[number]
        if part.raw:
            _put(fixed, self._pools[number].index_select(1, self._table).flatten())
        elif buffers is not None:
            _put(fixed, buffers.dense)
            words, positions, elements = part.cut(stream)
            _put(words, buffers.words[: part.words].view(torch.uint8))
            if part.escapes:
                found = buffers.positions[: part.escapes]
                order = _unsigned(found).argsort()
                _put(positions, found[order].view(torch.uint8))
                item = plan.format.item_bytes
                narrow = buffers.elements[: part.escapes][order].view(torch.uint8).view(-1, 4)[:, :item].flatten()
                _put(elements, narrow)


def encode(pages: PagedBlock, coding: Coding) -> GpuEncoding:
    """Launch the encoding of keys and values into all stages, on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    return GpuEncoding(pages, coding.plans, coding.num_stages)


def decode(stage: int, payloads: Sequence[Bytes], layouts: Sequence[Layout], coding: Coding, out: PagedBlock) -> None:
    """Write into `out`, on the current stream, what ANCHOR, or ANCHOR and RESIDUAL, code, or correct it by EXACT.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    pools, table = byte_pools(out), out.page_index()
    sources = [to_device(each, out.device) for each in payloads]
    fixed = [_fixed(source, layout) for source, layout in zip(sources, layouts, strict=True)]
    for part, pool, dense, stream in zip(layouts[0].parts, pools, fixed[0], layouts[0].streams, strict=True):
        if part.raw or (part.plan.raw and stage == ANCHOR):
            pool.index_copy_(1, table, dense[: part.plan.raw_bytes].view(pool.shape[0], -1, pool.shape[2]))
        elif stage == EXACT and not part.plan.raw:
            words = sources[0][stream:][: 4 * part.words].view(torch.int32)
            launch_exact_decode(pool, table, part.plan, dense, words)
            _put_escapes(sources[0][stream:], part, pool, table)
    if stage != EXACT:
        launch_decode(pools, table, [part.plan for part in layouts[0].parts], fixed)


def _fixed(source: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The fixed sections of keys and of values."""
    return [source[start:][: part.fixed_bytes] for part, start in zip(layout.parts, layout.offsets, strict=True)]


def _put_escapes(stream: torch.Tensor, part: Part, pool: torch.Tensor, table: torch.Tensor) -> None:
    """Write escapes to their places; stream: uint8 on the device, words and what follows them."""
    if not part.escapes:
        return
    plan, item = part.plan, part.plan.format.item_bytes
    _, found, elements = part.cut(stream)
    positions = _unsigned(found.view(torch.int32))
    tile, within = _divided(positions, plan.rows * plan.tile_columns)
    page, number = _divided(tile, plan.tiles_per_page)
    row, column = _divided(within, plan.tile_columns)
    layer, place = _divided(page, plan.num_pages)
    kind = torch.int32 if item == 4 else torch.int16
    where = row * plan.columns + column + number * plan.tile_columns
    pool.view(kind).index_put_([layer, table[place], where], elements.view(kind))


def _unsigned(positions: torch.Tensor) -> torch.Tensor:
    """32 bits each, which torch takes for signed, as int64."""
    return positions.to(torch.int64) & 0xFFFFFFFF


def _divided(numbers: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quotients and remainders of numbers that are not negative."""
    quotients = numbers.div(by, rounding_mode="floor")
    return quotients, numbers - quotients * by


def _put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Start to copy bytes to the beginning of `target`."""
    target[: source.numel()].copy_(source, non_blocking=True)
