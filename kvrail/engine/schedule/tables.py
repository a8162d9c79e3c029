"""Page tables of sequences: what a table begins with, how it grows and shrinks, and what it gives back.

`PageTables` is for pages that answer alike in whatever form they are. `kvrail.engine.schedule.lossy_tables` is for
forms that lose bits, where it is decided here which queries read which pages in which form.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from kvrail.engine.kv.pages import PagePool
from kvrail.engine.request.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV that a sequence need not compute: that of its first `tokens` tokens.

    pages: cached leading pages. copied: the page behind them, whose KV is to be copied. closed: see Sequence. awaits:
    whether another worker sends the rest in any case.
    """

    pages: list[int]
    copied: int | None
    tokens: int
    closed: int | None = None
    awaits: bool = False

    @property
    def held(self) -> list[int]:
        """All of its pages."""
        return self.pages if self.copied is None else [*self.pages, self.copied]


class PageTables:
    """The page tables of one engine's sequences."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    def pages_for(self, num_tokens: int) -> int:
        """Pages of `num_tokens` tokens."""
        return -(-num_tokens // self.pool.page_size)

    # -- a table begins ------------------------------------------------------------------------------------------

    def prefixes(self, sequence: Sequence, others: List[Sequence]) -> Iterator[Prefix]:
        """What the table can begin with, the most first; the last takes the fewest pages from others.

        others: running sequences of the request. The last token is computed all the same, since its logits are needed.
        If its page is cached, its KV goes to a page of the sequence's own, into which the cached page is copied. Cached
        tokens have no logits, so tokens to be scored are computed.
        """
        whole = self._whole(sequence)
        found = self.pool.match(sequence.shareable(self.pool.page_size))
        hits, tokens = found[:whole], min(len(found), whole) * self.pool.page_size
        if len(found) > whole and not self.awaits_kv(sequence, 1):
            yield Prefix(hits, found[whole], tokens + self.pool.page_size)
        if (page := self._sibling_page(sequence, len(hits), others)) is not None:
            yield Prefix(hits, page, len(sequence.prompt_ids))
        yield Prefix(hits, None, tokens)

    def awaits_kv(self, sequence: Sequence, uncached: int) -> bool:
        """Whether another worker sends the prompt's KV, if `uncached` tokens of it are not cached here."""
        return sequence.remote and not sequence.output_ids and uncached > sequence.local_tokens

    def fits(self, sequence: Sequence, prefix: Prefix, beside: int) -> bool:
        """Whether a waiting sequence can have its pages, and `beside` further ones be had."""
        fresh = self.pages_for(len(sequence.token_ids)) - len(prefix.pages)
        return self.pool.can_allocate(fresh + beside, prefix.held, self._spared(prefix))

    def take(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Give a sequence its pages; returns whether another worker sends its KV."""
        hits = prefix.pages
        self._acquire(prefix)
        fresh = self.pool.allocate(self.pages_for(len(sequence.token_ids)) - len(hits))
        whole = len(hits) if prefix.copied is not None else self._whole(sequence)
        restored = self.pool.restore(sequence.shareable(self.pool.page_size)[len(hits) : whole], fresh)
        computed = prefix.tokens + restored * self.pool.page_size
        sequence.page_table, sequence.copied_page, sequence.closed = [*hits, *fresh], prefix.copied, prefix.closed
        self.pool.follow(hits)
        sequence.computed = min(computed, len(sequence.token_ids) - 1)
        sequence.published, sequence.borrowed = len(hits) + restored, computed > 0
        if not sequence.output_ids:
            sequence.cached_tokens = sequence.computed
        return prefix.awaits or self.awaits_kv(sequence, len(sequence.prompt_ids) - sequence.computed)

    # -- what a step reads ---------------------------------------------------------------------------------------

    def ready(self, sequence: Sequence, start: int) -> bool:
        """Whether a step can compute tokens from `start` on: the pages that they read have the form that they read."""
        return True

    def end(self, sequence: Sequence, start: int) -> int:
        """Where the tokens of one step end that begin at `start`: at `start`, if they are not ready.

        A first token that another worker drew may lie behind the prompt's pages; it decodes after them.
        """
        return len(sequence.page_table) * self.pool.page_size

    def can_compute(self, sequence: Sequence) -> bool:
        """Whether a prompt that was to be received can be computed in the pages that the sequence holds."""
        return True

    # -- a table grows, shrinks and ends -------------------------------------------------------------------------

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that the table lacks for `num_tokens` tokens."""
        return max(0, self.pages_for(num_tokens) - len(sequence.page_table))

    def has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether there are pages for `num_tokens` tokens and drafts without taking any from others."""
        return self.pool.can_allocate(self.missing(sequence, num_tokens))

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the pages that `num_tokens` tokens need; False if there are too few."""
        if room := self.has_room(sequence, num_tokens):
            sequence.page_table += self.pool.allocate(self.missing(sequence, num_tokens))
        return room

    def shrink(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give back the pages behind those of `num_tokens` tokens; False if there are none."""
        kept = self.pages_for(num_tokens)
        if len(sequence.page_table) <= kept:
            return False
        self._give_back(sequence.page_table[kept:])
        sequence.page_table = sequence.page_table[:kept]
        return True

    def publish(self, sequence: Sequence) -> None:
        """Full pages enter the prefix cache, and may be closed."""
        full = sequence.computed // self.pool.page_size
        hashes = sequence.hashes(self.pool.page_size)
        for number in range(sequence.published, full):
            if number < self._shared(sequence):
                self.pool.publish(sequence.page_table[number], hashes[number])
            self.pool.fill(sequence.page_table, number)
        sequence.published = max(sequence.published, full)

    def release(self, sequence: Sequence) -> None:
        """Give back all pages."""
        self.forget_copied(sequence)
        self._give_back(sequence.page_table, sequence.closed or 0)
        sequence.page_table, sequence.closed = [], None

    def forget_copied(self, sequence: Sequence) -> None:
        """The page to be copied has been, or need not be."""
        self._give_back(sequence.copied_pages)
        sequence.copied_page = None

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless each sequence's pages have the form that it reads."""
        for sequence in sequences:
            assert len(sequence.page_table) * self.pool.page_size >= sequence.computed, "KV without pages"

    def _whole(self, sequence: Sequence) -> int:
        """Pages before that of the last token."""
        return (len(sequence.token_ids) - 1) // self.pool.page_size

    def _sibling_page(self, sequence: Sequence, number: int, others: Iterable[Sequence]) -> int | None:
        """Page `number` of another sequence of the request, if it holds the end of their prompt and is not full."""
        begun, rest = divmod(len(sequence.prompt_ids), self.pool.page_size)
        if number != begun or not rest or sequence.solitary:
            return None
        whole = (s for s in others if s.copied_page is None and s.computed >= len(s.prompt_ids))
        return next((s.page_table[number] for s in whole), None)

    def _acquire(self, prefix: Prefix) -> None:
        self.pool.acquire(prefix.held)

    def _give_back(self, pages: List[int], closed: int = 0) -> None:
        """Release pages. closed: how many behind the first were read closed."""
        self.pool.release(pages)

    def _spared(self, prefix: Prefix) -> int:
        """Free open slots that a prefix takes."""
        return 0

    def _shared(self, sequence: Sequence) -> int:
        """How many leading pages other sequences may have too."""
        return len(sequence.page_table)
