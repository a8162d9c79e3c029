"""Page tables over pages that lose bits when they are closed: what is read in which form is a function of tokens alone.

With n tokens of prompt, a query at position p reads, if q = p // page_size is the number of its page:

    p < n     all pages open. So a prompt's KV is that of a worker with plain pages, bit for bit.
    p >= n    page 0 open, pages 1 to q - 2 closed, pages q - 1 and q open.

    |- 0 -|- 1 -| … |- q-2 -|- q-1 -|- q -|
     open   closed    closed   open   open

A page with a refused tile is never closed; it and all behind it are read open. Page q - 1 stays open so that there is
time to close it; a sequence for which a page is not closed yet waits. Nothing else is read: neither what is computed
beside a sequence, nor when its pages were closed, nor what it found cached changes its tokens.

Hence only pages of the prompt are shared, a sequence that must compute some of its prompt begins with pages that are
all open, and the tokens of one step lie in one page. Drafts on coarse KV are guesses: they read what is there.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List

from kvrail.engine.kv.fixed.slots import FixedSlots
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.request.sequence import Sequence
from kvrail.engine.schedule.tables import PageTables, Prefix

_OPEN_LAST = 2
"""Pages at a sequence's end that are read open: the one being filled, and the one before."""


class LossyTables(PageTables):
    """The page tables of one engine's sequences, over FixedSlots."""

    def __init__(self, pool: PagePool, slots: FixedSlots) -> None:
        super().__init__(pool)
        self._slots = slots

    def prefixes(self, sequence: Sequence, others: List[Sequence]) -> Iterator[Prefix]:
        """See PageTables. Pages whose form does not fit end the prefix."""
        size, whole, full = self.pool.page_size, self._whole(sequence), self._shared(sequence)
        found = self.pool.match(sequence.shareable(size)[:full])
        closed, usable = self._read_closed(found, full)
        if sequence.output_ids and usable == full:  # a sibling of one that has computed the prompt
            page = self._sibling_page(sequence, full, others)
            if page is not None or not len(sequence.prompt_ids) % size:
                yield Prefix(found, page, len(sequence.prompt_ids), closed)
        opened = next((number for number, page in enumerate(found) if not self._slots.is_open(page)), len(found))
        exact, tokens = found[: min(opened, whole)], min(opened, whole) * size
        if opened > whole and not self.awaits_kv(sequence, 1):
            yield Prefix(exact, found[whole], tokens + size, 0)
        if self.awaits_kv(sequence, len(sequence.prompt_ids) - tokens):
            usable = min(usable, whole)
            yield Prefix(found[:usable], None, usable * size, closed, awaits=True)
        else:
            yield Prefix(exact, None, tokens, 0)

    def ready(self, sequence: Sequence, start: int) -> bool:
        """Whether the pages are closed that a query at `start` reads closed; asks for those that are not.

        The sequence reads them closed from now on, and needs them open no more.
        """
        if start < len(sequence.prompt_ids):
            return True
        table, own = sequence.page_table, start // self.pool.page_size
        number = closed = sequence.closed or 0
        while number + _OPEN_LAST < own and self._slots.is_closed(table[number + 1]):
            number += 1
        sequence.closed = number
        self._slots.spare(table[closed + 1 : number + 1])
        missing = number + _OPEN_LAST < own and not self._slots.is_refused(table[number + 1])
        for page in table[number + 1 : own - 1] if missing else ():
            self._slots.want(page)
        if own > 1 and start % self.pool.page_size >= self.pool.page_size // 2:
            self._slots.want(table[own - 1])  # soon
        return not missing

    def end(self, sequence: Sequence, start: int) -> int:
        """See PageTables."""
        if start < len(sequence.prompt_ids):
            return min(len(sequence.prompt_ids), super().end(sequence, start))
        size = self.pool.page_size
        return min((start // size + 1) * size, super().end(sequence, start)) if self.ready(sequence, start) else start

    def can_compute(self, sequence: Sequence) -> bool:
        """Whether all pages are open: those of the prompt read them so."""
        return not sequence.closed

    def check(self, sequences: Iterable[Sequence]) -> None:
        """See PageTables."""
        sequences = list(sequences)
        super().check(sequences)
        for sequence in sequences:
            for number, page in enumerate(sequence.page_table):
                closed = 0 < number <= (sequence.closed or 0)
                has = self._slots.is_closed(page) if closed else self._slots.is_open(page)
                assert has, "a page lacks the form that is read"

    def _sibling_page(self, sequence: Sequence, number: int, others: Iterable[Sequence]) -> int | None:
        page = super()._sibling_page(sequence, number, others)
        return page if page is not None and self._slots.is_open(page) else None

    def _acquire(self, prefix: Prefix) -> None:
        super()._acquire(prefix)
        self._slots.need(_needed(prefix.held, prefix.closed or 0))

    def _give_back(self, pages: List[int], closed: int = 0) -> None:
        self._slots.spare(_needed(pages, closed))
        super()._give_back(pages, closed)

    def _spared(self, prefix: Prefix) -> int:
        return self._slots.count_spare(_needed(prefix.held, prefix.closed or 0))

    def _shared(self, sequence: Sequence) -> int:
        """Pages of the prompt alone: KV of output depends on pages that were read closed."""
        return len(sequence.prompt_ids) // self.pool.page_size

    def _read_closed(self, found: List[int], own: int) -> tuple[int, int]:
        """Of cached pages: how many behind the first are read closed from page `own` on, and how many can be used.

        Those behind the closed ones are needed open: whether a page will be closed is not known before it is.
        """
        if not found or not self._slots.is_open(found[0]):
            return 0, 0
        closed = 0
        while closed + 1 < len(found) and closed + _OPEN_LAST < own and self._slots.is_closed(found[closed + 1]):
            closed += 1
        usable = closed + 1
        while usable < len(found) and self._slots.is_open(found[usable]):
            usable += 1
        return closed, usable


def _needed(pages: List[int], closed: int) -> list[int]:
    """The pages that are needed open: all but `closed` behind the first."""
    return [*pages[:1], *pages[1 + closed :]]


def tables_of(pool: PagePool) -> PageTables:
    """The page tables over a pool."""
    return LossyTables(pool, pool.slots) if isinstance(pool.slots, FixedSlots) else PageTables(pool)
