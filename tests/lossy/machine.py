"""A machine whose pages lose bits when they are closed, and what it says if every query reads as it should.

KV is a number that depends on all that its token read. So one page that is read in the wrong form, once, changes all
tokens that follow. `spoken` is the same machine without pages, engine or time.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvrail.engine.batch.batch import Extras, Feed, SequenceSlice
from kvrail.engine.kv.fixed.slots import FixedSlots
from kvrail.engine.kv.slots import Closing
from kvrail.engine.sampling.draw import DrawParams
from tests.engine.bench import Bench, Transfer
from tests.engine.page_machine import VOCAB, PageMachine, drawn_from
from tests.lossless.slotted import Outcome

PAGE = 4
REFUSED_IN = 23
"""One page in so many holds what cannot be closed."""


def kv_of(read: Sequence[int], token: int) -> int:
    """KV of a token that read all KV before it."""
    return zlib.crc32(np.asarray([*read, token], dtype=np.int64).tobytes())


def lossy(page: Sequence[int]) -> list[int]:
    """What is left of a page once it was closed."""
    return [value & ~0xFF for value in page]


def refused(page: Sequence[int]) -> bool:
    """Whether a page cannot be closed."""
    return sum(page) % REFUSED_IN == 0


def seen(kv: Sequence[int], prompt: int) -> list[int]:
    """What the token behind `kv` reads, by the contract; prompt: tokens of it."""
    position, own = len(kv), len(kv) // PAGE
    pages = [list(kv[begin : begin + PAGE]) for begin in range(0, position, PAGE)]
    if position >= prompt:
        for number in range(1, own - 1):
            if refused(pages[number]):
                break
            pages[number] = lossy(pages[number])
    return [value for page in pages for value in page]


def kv_of_prompt(prompt: Sequence[int]) -> list[int]:
    kv: list[int] = []
    for token in prompt:
        kv.append(kv_of(kv, token))
    return kv


def spoken(prompt: Sequence[int], count: int, index: int = 0) -> list[int]:
    """The first `count` tokens behind a prompt; the n sequences differ in their first one."""
    kv = kv_of_prompt(prompt)
    output = [(kv[-1] + index) % VOCAB]
    while len(output) < count:
        kv.append(kv_of(seen(kv, len(prompt)), output[-1]))
        output.append(kv[-1] % VOCAB)
    return output[:count]


class LossyCells:
    """Stands for LossyCache: open pages in slots, closed ones in their own places; outcomes are known late.

    polls: after so many, or fewer.
    """

    polls = 4
    raw_tiles = 0
    page_tiles = 1

    def __init__(self, num_pages: int, open_pages: int, seed: int) -> None:
        self.slots = FixedSlots(num_pages, open_pages)
        self.open = np.full((open_pages, PAGE), -1, dtype=np.int64)
        self.closed = np.full((num_pages, PAGE), -1, dtype=np.int64)
        self.closings = self.refusals = 0
        self._rng = random.Random(seed)

    def __getitem__(self, place: Any) -> Any:
        page, offset = place if isinstance(place, tuple) else (place, slice(None))
        return self.open[self._slot(page), offset]

    def __setitem__(self, place: Any, value: Any) -> None:
        page, offset = place if isinstance(place, tuple) else (place, slice(None))
        self.open[self._slot(page), offset] = value

    def read(self, piece: SequenceSlice) -> list[int]:
        """All KV before a slice, as it says."""
        found: list[int] = []
        for number, page in enumerate(piece.page_table[: -(-piece.start // PAGE)]):
            closed = 0 < number <= piece.closed
            assert not closed or self.slots.is_closed(page)
            found += (self.closed[page] if closed else self[page]).tolist()
        return found[: piece.start]

    def close(self, closing: Closing) -> Outcome:
        pages = [self.open[slot].tolist() for slot in closing.sources]
        assert not any(-1 in page for page in pages), "a page that is not full is closed"
        for page, target in zip(pages, closing.targets, strict=True):
            self.closed[target] = -2 if refused(page) else lossy(page)
        failed = [int(refused(page)) for page in pages]
        self.closings += len(pages)
        self.refusals += sum(failed)
        return Outcome(failed, self._rng.randrange(self.polls))

    def take_in(self, outcome: Outcome) -> None:
        pass

    def _slot(self, page: int) -> int:
        slot = int(self.slots.open_slot[page])
        assert slot >= 0, "a page that is not open is read or written"
        return slot


class LossyMachine(PageMachine):
    """Computes over LossyCells; see PageMachine."""

    cells: Any

    def execute(
        self,
        slices: Sequence[SequenceSlice],
        on_layer: Callable[[int], None] | None = None,
        feed: Feed | None = None,
        draws: Sequence[DrawParams] = (),
    ) -> torch.Tensor:
        self.steps.append([len(piece.token_ids) for piece in slices])
        if feed is not None:
            fed = [
                replace(piece, token_ids=feed.tokens[[row]].clamp(min=0).tolist())
                for piece, row in zip(slices, feed.rows, strict=False)
            ]
            slices = [*fed, *slices[len(fed) :]]
        for piece in slices:
            if piece.copied_page is not None:
                self.cells[piece.page_table[piece.start // PAGE]] = self.cells[piece.copied_page]
        rows = [row for piece in slices for row in self._computed(piece)]
        if on_layer is not None:
            on_layer(0)
        self.meanwhile()
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
        self.extras = Extras()
        if draws and all(len(piece.token_ids) == 1 for piece in slices):
            self.extras = Extras(drawn=self._draws[: len(draws)].copy_(drawn_from(logits)))
        return logits

    def _computed(self, piece: SequenceSlice) -> list[torch.Tensor]:
        """Logits of a slice, whose KV is written."""
        kv, logits = self.cells.read(piece), []
        assert -1 not in kv and -2 not in kv, "KV was read that was never written"
        for position, token in enumerate(piece.token_ids, start=piece.start):
            kv.append(kv_of(kv, token))
            self.write(piece.page_table, position, kv[-1:])
            logits.append(torch.nn.functional.one_hot(torch.tensor(kv[-1] % VOCAB), VOCAB).float())
        return logits[len(logits) - piece.num_logits :]


class LossyBench(Bench):
    """A bench over pages that lose bits."""

    def __init__(self, num_pages: int, open_pages: int, seed: int = 0, *, ahead: bool = False, **limits: Any) -> None:
        self.cells = LossyCells(num_pages, open_pages, seed)
        super().__init__(num_pages, PAGE, slotted=self.cells, machine=LossyMachine, ahead=ahead, **limits)


class LossyTransfer(Transfer):
    """A transfer of KV that a worker with exact pages has computed; wrong: its coarse form."""

    def first(self) -> None:
        self.report_first(spoken(self.prompt, 1)[0])

    def write(self, wrong: bool) -> None:
        kv = [value + wrong for value in kv_of_prompt(self.prompt)]
        kv += [77] * (-len(kv) % PAGE)
        self.bench.machine.write(self.lease.pages, self.held, kv[self.held :])
