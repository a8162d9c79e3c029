"""A runner without a model: it keeps token ids in pages and continues a text by a checksum of all its tokens.

The next token depends on every token read back through the page table, so any mistake in pages, prefix cache,
preemption or transfer changes the output. `expected` is the same machine without pages.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvrail.engine.batch.batch import NOT_DRAWN, Extras, Feed, SampledToken, SampleRow, SequenceSlice
from kvrail.engine.sampling.draw import GREEDY, DrawParams

VOCAB = 101
POISON = 1_000_000
"""In a cell: KV that is not finite. A token that reads it has NaN as logits, from which nothing is drawn."""


def next_token(tokens: Sequence[int], index: int = 0) -> int:
    return (zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes()) + index) % VOCAB


def drawn_from(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1).masked_fill(logits.isnan().any(1), NOT_DRAWN)


def expected(prompt: Sequence[int], count: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, index if len(tokens) == len(prompt) else 0))
    return tokens[len(prompt) :]


class PageMachine:
    """ahead: steps are enqueued before the draws of the one before are known, and draw by themselves, as on a GPU."""

    def __init__(self, num_pages: int, page_size: int, *, ahead: bool = False) -> None:
        self.launches_async = ahead
        self.fed = self.drew = 0
        self.extras = Extras()
        self.near_end: Any = None
        self._draws = torch.zeros(4096, dtype=torch.int64)  # all steps draw into the same memory
        self.cells = np.full((num_pages, page_size), -1, dtype=np.int64)
        self.page_size = page_size
        self.steps: list[list[int]] = []
        self.meanwhile: Callable[[], None] = lambda: None  # what other threads do while a step computes

    def bind_thread(self) -> None:
        pass

    def write(self, page_table: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        for offset, token in enumerate(tokens, start=start):
            self.cells[page_table[offset // self.page_size], offset % self.page_size] = token

    def read(self, page_table: Sequence[int], count: int) -> list[int]:
        return self.cells[list(page_table)].reshape(-1)[:count].tolist()

    def execute(
        self,
        slices: Sequence[SequenceSlice],
        on_layer: Callable[[int], None] | None = None,
        feed: Feed | None = None,
        draws: Sequence[DrawParams] = (),
    ) -> torch.Tensor:
        self.steps.append([len(piece.token_ids) for piece in slices])
        if feed is not None:
            self.fed += len(feed.rows)
            fed = [
                replace(piece, token_ids=feed.tokens[[row]].clamp(min=0).tolist())
                for piece, row in zip(slices, feed.rows, strict=False)
            ]
            slices = [*fed, *slices[len(fed) :]]
        rows = []
        for piece in slices:
            if piece.copied_page is not None:
                self.cells[piece.page_table[piece.start // self.page_size]] = self.cells[piece.copied_page]
        for piece in slices:
            self.write(piece.page_table, piece.start, piece.token_ids)
            tokens = self.read(piece.page_table, piece.start + len(piece.token_ids))
            assert -1 not in tokens, "KV was read that was never written"
            for end in range(len(tokens) - piece.num_logits + 1, len(tokens) + 1):
                row = torch.nn.functional.one_hot(torch.tensor(next_token(tokens[:end])), VOCAB).float()
                rows.append(torch.full_like(row, torch.nan) if POISON in tokens[:end] else row)
        if on_layer is not None:
            on_layer(0)
        self.meanwhile()
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
        self.extras = Extras(near_end=self.near_end)
        if draws and all(len(piece.token_ids) == 1 for piece in slices):
            assert all(draw == GREEDY for draw in draws)
            self.drew += len(draws)
            self.extras = replace(self.extras, drawn=self._draws[: len(draws)].copy_(drawn_from(logits)))
        return logits


@dataclass
class Drawn:
    """A sample that is known at once and waited for once."""

    tokens: torch.Tensor
    known: list[int] = field(init=False)
    asked: bool = False

    def __post_init__(self) -> None:
        self.known = self.tokens.tolist()

    def wait(self) -> list[SampledToken]:
        assert not self.asked
        self.asked = True
        return [SampledToken(token) for token in self.known]


class FirstIndexShift:
    """Draws the machine's token; the n sequences of a request differ in their first one."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        return self.begin(logits, rows).wait()

    def params_of(self, rows: Sequence[SampleRow]) -> list[DrawParams]:
        return [] if any(self._shifts(rows)) else [GREEDY] * len(rows)

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        masks: None = None,
        drawn: torch.Tensor | None = None,
    ) -> Drawn:
        assert logits.shape == (len(rows), VOCAB)
        if drawn is not None:
            return Drawn(drawn)
        first = self._shifts(rows)
        shifted = (logits.argmax(1) + torch.tensor(first)) % VOCAB
        return Drawn(shifted.where(drawn_from(logits) != NOT_DRAWN, NOT_DRAWN))

    @staticmethod
    def _shifts(rows: Sequence[SampleRow]) -> list[int]:
        return [ask.index if ask.position == len(ask.prompt_ids) else 0 for ask in rows]
