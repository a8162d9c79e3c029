"""A pool that closes full pages: they keep every bit in three quarters of the memory.

Open pages lie in `open_pages` slots of plain tensors, closed ones in slots of `kvrail.engine.kv.lossless.pages`.
`PageSlots` says which page lies where. Work on closed pages is enqueued on the stream of the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvrail.engine.kv.cache import PagedCache, memory_for_pages
from kvrail.engine.kv.lossless.form import TOKENS
from kvrail.engine.kv.lossless.pages import ClosedPages, page_bytes, unsupported
from kvrail.engine.kv.lossless.slots import Closing, PageSlots
from kvrail.errors import ConfigError, KvrailError
from kvrail.values.layout import KVLayout

_TILES_PER_UNIT = 64
"""Tiles for which there is one spare unit: 1 % of the memory. Some 0.03 % of tiles of real KV are raw."""


@dataclass(frozen=True, slots=True)
class LosslessSize:
    """How many pages there are, and how many of them may be open at once."""

    num_pages: int
    open_pages: int


class Closed:
    """The outcome of a closing, on its way to the host."""

    def __init__(self, failed: torch.Tensor, free_units: torch.Tensor) -> None:
        both = torch.cat([failed, free_units.long()])
        self._event: torch.cuda.Event | None = None
        self._both = both
        if both.is_cuda:
            self._both = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._both.copy_(both, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def known(self, *, wait: bool = False) -> bool:
        """Whether the outcome is here."""
        if self._event is not None and wait:
            self._event.synchronize()
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    @property
    def failed(self) -> list[int]:
        """Tiles of each page that found no spare unit."""
        return [int(count) for count in self._both[:-1].tolist()]

    @property
    def free_units(self) -> int:
        """Spare units that are free."""
        return int(self._both[-1])


class LosslessCache(PagedCache):
    """The pool. Raises ConfigError where pages of `layout` have no closed form: see `refusal`."""

    def __init__(self, layout: KVLayout, size: LosslessSize, device: torch.device | str) -> None:
        self._slots = PageSlots(size.num_pages, size.open_pages)
        super().__init__(replace(layout, page_format="lossless"), size.num_pages, device)
        self.closed = ClosedPages(layout, self._slots.closed_slots, units_for(layout, self._slots.closed_slots), device)
        self.page_tiles = _tiles(layout)
        self.num_units = self.free_units = len(self.closed.free) - 2  # free ones: at the last closing
        self.tensors |= {"closed": self.closed.pages, "spare": self.closed.spare}

    @property
    def slots(self) -> PageSlots:
        """Where pages lie."""
        return self._slots

    @property
    def open_pages(self) -> int:
        """The most pages that are open at once."""
        return self._slots.open_slots

    def copy_page(self, src: int, dst: int) -> None:
        """Copy page `src` of all layers to the open page `dst`, on the current stream."""
        source, target = (int(self._slots.slot_of[page]) for page in (src, dst))
        if source >= 0:
            for tensor in self.as_block():
                tensor[:, target].copy_(tensor[:, source])
        else:
            self.closed.open(*self.as_block(), *self._numbers([-1 - source], [target]))

    def as_block(self) -> list[torch.Tensor]:
        """Keys and values of all open slots: [layers, slots, page_size, kv_heads, dim]."""
        return [self.tensors["keys"], self.tensors["values"]]

    def close(self, closing: Closing) -> Closed:
        """Close pages, on the current stream."""
        if closing.dropped:
            self.closed.give_back(*self._numbers(closing.dropped))
        failed = self.closed.close(*self.as_block(), *self._numbers(closing.sources, closing.targets))
        return Closed(failed, self.closed.free[:1])

    def rehearse(self) -> None:
        """Compile what closes and opens pages, and try both on the first page. Overwrites the first pages.

        Raises KvrailError where a page that was closed and opened has other bits.
        """
        outcome = self.close(Closing([0], [0], []))
        outcome.known(wait=True)
        target = self.open_pages - 1
        self.closed.open(*self.as_block(), *self._numbers([0], [target]))
        pools = [pool.view(torch.int16) for pool in self.as_block()]
        same = all(torch.equal(pool[:, 0], pool[:, target]) for pool in pools)
        self.closed.give_back(*self._numbers([0]))
        if not same and not any(outcome.failed):
            raise KvrailError(
                "a lossless page was opened with other bits than it was closed with; set kv_cache to plain"
            )

    def opened(self, layers: range, slots: Sequence[int]) -> list[torch.Tensor]:
        """Plain copies of some layers of pages: [layers, pages, page_size, kv_heads, dim] of keys and of values.

        slots: those of pages that keep their form meanwhile, as `PageSlots.slot_of` has them.
        """
        closed = [(-1 - slot, number) for number, slot in enumerate(slots) if slot < 0]
        opened = [(slot, number) for number, slot in enumerate(slots) if slot >= 0]
        here, there = self._numbers([slot for slot, _ in opened], [number for _, number in opened])
        made = []
        for pool in self.as_block():
            copy = pool.new_empty(len(layers), len(slots), *pool.shape[2:])
            copy.index_copy_(1, there, pool[layers.start : layers.stop].index_select(1, here))
            made.append(copy)
        numbers = self._numbers([slot for slot, _ in closed], [number for _, number in closed])
        self.closed.of_layers(layers).open(*made, *numbers)
        return made

    def _numbers(self, *lists: Sequence[int]) -> list[torch.Tensor]:
        """int64 on the device, by copies that nothing waits for."""
        made = (torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda") for numbers in lists)
        return [numbers.to(self.device, non_blocking=True) for numbers in made]


def refusal(layout: KVLayout, device: torch.device, dtype: torch.dtype) -> str:
    """Why a model that computes in `dtype` on `device` cannot have closed pages; empty where it can."""
    if why := unsupported(layout):
        return why
    if device.type == "cuda" and (dtype.itemsize != 2 or not {layout.key_dim, layout.value_dim} <= {64, 128}):
        return f"a GPU computes over lossless pages in 16 bits, heads of 64 or 128; not {layout.key_dim} in {dtype}"
    return ""


def units_for(layout: KVLayout, closed: int) -> int:
    """Spare units for `closed` pages, and two pages' tiles beside, so that few odd pages of a small pool do no harm."""
    tiles = _tiles(layout)
    return closed * tiles // _TILES_PER_UNIT + 2 * tiles


def size_that_fits(
    layout: KVLayout, device: torch.device | str, kv_memory_gib: float, *, max_running: int, max_model_len: int
) -> LosslessSize:
    """Pages that fit into `memory_for_pages`. Raises ConfigError where fewer than two do, or none can be closed.

    Open ones are as many as the longest request has, and two more for each running sequence; at least a sixteenth of
    the memory, and at most three quarters.
    """
    budget = memory_for_pages(device, kv_memory_gib)
    plain = budget // layout.page_bytes
    open_pages = max(min(layout.pages_for(max_model_len) + 2 * max_running, plain * 3 // 4), plain // 16)
    unit = TOKENS * max(layout.key_dim, layout.value_dim)
    left = budget - open_pages * layout.page_bytes - unit * units_for(layout, 0)
    closed = left // (page_bytes(layout) + -(-unit * _tiles(layout) // _TILES_PER_UNIT))
    if open_pages < 2 or closed < 1:
        raise ConfigError(
            f"{budget / (1 << 30):.2f} GiB hold no closed page beside {max(open_pages, 2)} open ones of"
            f" {layout.page_bytes} bytes; raise kv_memory_gib or set kv_cache to plain"
        )
    return LosslessSize(open_pages + closed, open_pages)


def _tiles(layout: KVLayout) -> int:
    """Tiles of a page, keys and values, over all layers."""
    return 2 * layout.num_layers * layout.num_kv_heads * (layout.page_size // TOKENS)
