"""Pools that close full pages: lossless ones keep every bit in three quarters of the memory, lossy ones lose some.

Open pages lie in `open_pages` slots of plain tensors, closed ones in slots of their form's own: see
`kvrail.engine.kv.closed`. `PageSlots` says which page lies where. Work on closed pages
is enqueued on the stream of the steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvrail.engine.kv.cache import PagedCache, memory_for_pages
from kvrail.engine.kv.closed.forms import CODE_BITS, FORMS, page_bytes, table_bytes, unsupported
from kvrail.engine.kv.closed.pages import LosslessPages, LossyPages
from kvrail.engine.kv.fixed.slots import FixedSlots
from kvrail.engine.kv.lossless.form import TOKENS
from kvrail.engine.kv.lossless.slots import LosslessSlots
from kvrail.engine.kv.slots import Closing, PageSlots
from kvrail.errors import ConfigError, KvrailError
from kvrail.values.layout import KVLayout

_TILES_PER_UNIT = 64
"""Tiles for which there is one spare unit: 1 % of the memory. Some 0.03 % of tiles of real KV are raw."""
_OPEN_EACH = {"lossless": 2, **dict.fromkeys(CODE_BITS, 3)}
"""Pages of a running sequence that are open: the one being filled, one being closed, and one that is still read open
where closing loses bits."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many pages there are, how many of them may be open at once, and the form of closed ones."""

    num_pages: int
    open_pages: int
    form: str = "lossless"


class Outcome:
    """The outcome of a closing, on its way to the host. counts: int64, failed tiles of each page, then free units."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._counts = counts
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def known(self, *, wait: bool = False) -> bool:
        """Whether the outcome is here."""
        if self._event is not None and wait:
            self._event.synchronize()
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    @property
    def failed(self) -> list[int]:
        """Tiles of each page that could not be closed."""
        return [int(count) for count in self._counts[:-1].tolist()]

    @property
    def free_units(self) -> int:
        """Spare units that are free; 0 where the form has none."""
        return int(self._counts[-1])


class ClosingCache(PagedCache, ABC):
    """What both kinds of pools have in common. slots, closed: where pages lie, and the closed ones."""

    closed: Any

    def __init__(self, layout: KVLayout, size: PoolSize, slots: PageSlots, device: torch.device | str) -> None:
        self._slots = slots
        super().__init__(replace(layout, page_format=size.form), size.num_pages, device)
        self.page_tiles = _tiles(layout)
        self.raw_tiles = 0
        """Closed tiles that take a spare unit, at the last closing."""

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
        source, target = self.where([src, dst])
        if source < 0:
            self.open_closed(source, target)
        else:
            for tensor in self.as_block():
                tensor[:, target].copy_(tensor[:, source])

    def as_block(self) -> list[torch.Tensor]:
        """Keys and values of all open slots: [layers, slots, page_size, kv_heads, dim]."""
        return [self.tensors["keys"], self.tensors["values"]]

    @abstractmethod
    def close(self, closing: Closing) -> Outcome:
        """Close pages, on the current stream."""

    @abstractmethod
    def open_closed(self, source: int, target: int) -> None:
        """Open a closed page, less than 0 as `where` has it, into an open slot."""

    def take_in(self, outcome: Outcome) -> None:
        """A closing has ended."""

    def rehearse(self) -> None:
        """Compile what closes and opens pages, and try both on the first page. Overwrites the first pages.

        Raises KvrailError where the page that was opened is not what it should be.
        """
        outcome = self.close(Closing([0], [0], []))
        outcome.known(wait=True)
        target = self.open_pages - 1
        self.closed.open(*self.as_block(), *self._numbers([0], [target]))
        self._check_rehearsal(target, refused=any(outcome.failed))

    def opened(self, layers: range, slots: Sequence[int]) -> list[torch.Tensor]:
        """Plain copies of some layers of pages: [layers, pages, page_size, kv_heads, dim] of keys and of values.

        slots: those of pages that keep their form meanwhile, as `where` has them.
        """
        raise ValueError("a transfer reads open pages alone where closed ones lose bits")

    def _check_rehearsal(self, target: int, *, refused: bool) -> None:
        """Raise KvrailError unless the open slot `target` has what slot 0 had."""

    def _numbers(self, *lists: Sequence[int]) -> list[torch.Tensor]:
        """int64 on the device, by copies that nothing waits for."""
        made = (torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda") for numbers in lists)
        return [numbers.to(self.device, non_blocking=True) for numbers in made]


class LosslessCache(ClosingCache):
    """A pool of lossless pages. Raises ConfigError where pages of `layout` have no closed form: see `refusal`."""

    _slots: LosslessSlots

    def __init__(self, layout: KVLayout, size: PoolSize, device: torch.device | str) -> None:
        slots = LosslessSlots(size.num_pages, size.open_pages)
        super().__init__(layout, size, slots, device)
        closed = slots.closed_slots
        self.closed: LosslessPages = LosslessPages(layout, closed, units_for(layout, closed), device)
        self.num_units = len(self.closed.free) - 2
        self.tensors |= self.closed.tensors

    def where(self, pages: Sequence[int]) -> list[int]:
        """See PagedCache; -1 - slot of a closed page."""
        return [int(self._slots.slot_of[page]) for page in pages]

    def close(self, closing: Closing) -> Outcome:
        """Close pages, on the current stream."""
        if closing.dropped:
            self.closed.give_back(*self._numbers(closing.dropped))
        failed = self.closed.close(*self.as_block(), *self._numbers(closing.sources, closing.targets))
        return Outcome(torch.cat([failed, self.closed.free[:1].long()]))

    def open_closed(self, source: int, target: int) -> None:
        """See ClosingCache."""
        self.closed.open(*self.as_block(), *self._numbers([-1 - source], [target]))

    def take_in(self, outcome: Outcome) -> None:
        """See ClosingCache."""
        self.raw_tiles = self.num_units - outcome.free_units

    def opened(self, layers: range, slots: Sequence[int]) -> list[torch.Tensor]:
        """See ClosingCache."""
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

    def _check_rehearsal(self, target: int, *, refused: bool) -> None:
        pools = [pool.view(torch.int16) for pool in self.as_block()]
        same = all(torch.equal(pool[:, 0], pool[:, target]) for pool in pools)
        self.closed.give_back(*self._numbers([0]))
        if not same and not refused:
            raise KvrailError(
                "a lossless page was opened with other bits than it was closed with; set kv_cache to plain"
            )


class LossyCache(ClosingCache):
    """A pool of pages whose closing loses bits. Raises ConfigError where `layout` has no such form: `refusal`."""

    _slots: FixedSlots

    def __init__(self, layout: KVLayout, size: PoolSize, device: torch.device | str) -> None:
        super().__init__(layout, size, FixedSlots(size.num_pages, size.open_pages), device)
        self.closed = LossyPages(layout, size.num_pages, CODE_BITS[size.form], device)
        self.tensors |= self.closed.tensors

    def where(self, pages: Sequence[int]) -> list[int]:
        """See PagedCache; -1 of a page that is closed alone."""
        return [int(self._slots.open_slot[page]) for page in pages]

    def close(self, closing: Closing) -> Outcome:
        """Close pages, on the current stream."""
        refused = self.closed.close(*self.as_block(), *self._numbers(closing.sources, closing.targets))
        return Outcome(torch.cat([refused, refused.new_zeros(1)]))

    def open_closed(self, source: int, target: int) -> None:
        """See ClosingCache."""
        raise RuntimeError("a page that is closed alone is to be copied; its bits are lost")


def closing_cache(layout: KVLayout, size: PoolSize, device: torch.device | str) -> ClosingCache:
    """The pool of this size and form."""
    return (LossyCache if size.form in CODE_BITS else LosslessCache)(layout, size, device)


def refusal(form: str, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> str:
    """Why a model that computes in `dtype` on `device` cannot have pages closed in `form`; empty where it can."""
    if why := unsupported(layout, FORMS[form]):
        return why
    if device.type == "cuda" and (dtype.itemsize != 2 or not {layout.key_dim, layout.value_dim} <= {64, 128}):
        return f"a GPU computes over {form} pages in 16 bits, heads of 64 or 128; not {layout.key_dim} in {dtype}"
    return ""


def units_for(layout: KVLayout, closed: int) -> int:
    """Spare units for `closed` pages, and two pages' tiles beside, so that few odd pages of a small pool do no harm."""
    tiles = _tiles(layout)
    return closed * tiles // _TILES_PER_UNIT + 2 * tiles


def size_that_fits(
    layout: KVLayout,
    device: torch.device | str,
    kv_memory_gib: float,
    form: str,
    *,
    max_running: int,
    max_model_len: int,
) -> PoolSize:
    """Pages that fit into `memory_for_pages`. Raises ConfigError where fewer than two do, or none can be closed.

    Open ones are as many as the longest request has, and a few more for each running sequence; at least a sixteenth of
    the memory, and at most three quarters. In a lossy form every page can be closed.
    """
    budget = memory_for_pages(device, kv_memory_gib)
    plain = budget // layout.page_bytes
    wanted = layout.pages_for(max_model_len) + _OPEN_EACH[form] * max_running
    open_pages = max(min(wanted, plain * 3 // 4), plain // 16)
    each = page_bytes(layout, FORMS[form])
    if form in CODE_BITS:
        budget -= table_bytes(CODE_BITS[form])
        open_pages = min(open_pages, budget // (layout.page_bytes + each))
        closed = num_pages = (budget - open_pages * layout.page_bytes) // each
    else:
        unit = TOKENS * max(layout.key_dim, layout.value_dim)
        left = budget - open_pages * layout.page_bytes - unit * units_for(layout, 0)
        closed = left // (each + -(-unit * _tiles(layout) // _TILES_PER_UNIT))
        num_pages = open_pages + closed
    if open_pages < 2 or closed < 1:
        raise ConfigError(
            f"{budget / (1 << 30):.2f} GiB hold no closed page beside {max(open_pages, 2)} open ones of"
            f" {layout.page_bytes} bytes; raise kv_memory_gib or set kv_cache to plain"
        )
    return PoolSize(num_pages, open_pages, form)


def _tiles(layout: KVLayout) -> int:
    """Tiles of a page, keys and values, over all layers."""
    return 2 * layout.num_layers * layout.num_kv_heads * (layout.page_size // TOKENS)
