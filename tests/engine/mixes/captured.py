"""A machine whose steps are captured, as on a GPU, and draw by themselves (captured_machine.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvrail.engine.batch.batch import Feed, SequenceSlice
from kvrail.engine.sampling.draw import DrawParams
from tests.engine.captured_machine import CapturedRunner
from tests.engine.mixes.machine import Trouble


class CapturedCells:
    """The token ids in a runner's pages: a page's at [page]."""

    def __init__(self, keys: torch.Tensor, page_size: int) -> None:
        self._cells = keys.view(-1, page_size)

    def __getitem__(self, page: int) -> list[float]:
        found: list[float] = self._cells[page].tolist()
        return found

    def __setitem__(self, page: int, values: list[int]) -> None:
        self._cells[page] = torch.tensor(values, dtype=self._cells.dtype)


class CapturedMachine(CapturedRunner):
    """CapturedRunner, with trouble."""

    def __init__(self, pages: int, page_size: int, trouble: Trouble, *, most_tokens: int, most_slices: int) -> None:
        super().__init__(pages, page_size, max_running=most_slices, max_batch_tokens=most_tokens)
        self.trouble = trouble
        self.cells = CapturedCells(self.cache.tensors["keys"][0], page_size)

    def execute(
        self,
        slices: Sequence[SequenceSlice],
        on_layer: Callable[[int], None] | None = None,
        feed: Feed | None = None,
        draws: Sequence[DrawParams] = (),
    ) -> Any:
        """See ModelRunner."""
        logits = super().execute(slices, on_layer, feed, draws)
        self.trouble.come()
        return logits
