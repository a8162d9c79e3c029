"""A step in the device's hands, and the parts of the engine that it goes through.

computed, its tokens drawn     ready to be landed; the step behind it can be enqueued, fed from the draws
computed, not drawn yet        a grammar decides about a draw by what the step before gives: its masks are found once
that one has landed, while the device computes this one
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from kvrail.engine.batch.batch import Drawing, Extras, Feed, SampledToken, SampleRow, SequenceSlice
from kvrail.engine.sampling.draw import DrawParams
from kvrail.engine.sampling.logprobs import Scores
from kvrail.engine.sampling.masks import MaskFinder, Masks
from kvrail.engine.schedule.planning import Step
from kvrail.values.sampling import PromptLogprobs


class Runner(Protocol):
    """Computes a step (kvrail.engine.step.runner)."""

    @property
    def launches_async(self) -> bool:
        """Whether `execute` returns before the device has finished."""

    def bind_thread(self) -> None:
        """Called once by the thread that will execute."""

    def execute(
        self,
        slices: Sequence[SequenceSlice],
        on_layer: Callable[[int], None] | None = None,
        feed: Feed | None = None,
        draws: Sequence[DrawParams] = (),
    ) -> torch.Tensor:
        """Logits, float32 [sum of the slices' num_logits, vocabulary], in the order of the slices.

        draws: for each row of logits what to draw from it, if the step can do that by itself.
        """

    @property
    def extras(self) -> Extras:
        """What the last step gives beside its logits."""


class Draws(Protocol):
    """Draws tokens from logits (kvrail.engine.sampling.sampler)."""

    def params_of(self, rows: Sequence[SampleRow]) -> list[DrawParams]:
        """What the rows' draws depend on beside their logits; empty where they take more than that."""

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        masks: Masks | None = None,
        drawn: torch.Tensor | None = None,
    ) -> Drawing:
        """One token a row, of those that its mask allows; may return before the device has drawn them.

        drawn: the tokens, where the step has drawn them.
        """


class Flight:
    """A step that the device has. begin: when it was given to it, in seconds of perf_counter."""

    def __init__(self, step: Step, begin: float, masks: "Future[Masks] | None") -> None:
        self.step = step
        self.begin = begin
        self.drawing: Drawing | None = None
        self._masks = masks
        self._logits: torch.Tensor | None = None
        self._extras = Extras()
        self._scores: Scores | None = None

    @property
    def undrawn(self) -> bool:
        """Whether `draw` is still to be called."""
        return self._logits is not None

    @property
    def near_end(self) -> Any:
        """The event that little of the step is left, or None."""
        return self._extras.near_end

    def computed(self, logits: torch.Tensor, extras: Extras) -> None:
        """Take in what the device computes; it is valid until the device is given the next step."""
        self._extras = extras
        if self.step.scoring:
            self._scores = Scores(logits, self.step.scoring)
        rows = self.step.logit_rows
        if rows:
            in_order = rows == list(range(logits.shape[0]))  # equal counts do not do: a prompt's row can serve n draws
            self._logits = logits if in_order else logits[rows]

    def find_masks(self, finder: MaskFinder) -> None:
        """Begin to find the masks: every token before the rows is known now."""
        if self.undrawn:
            self._masks = finder.begin(self.step)

    def draw(self, sampler: Draws) -> None:
        """Enqueue the draws, once the masks are here."""
        if self._logits is None:
            return
        masks = None if self._masks is None else self._masks.result()
        if masks is not None:
            self.step.stuck.update(masks.stuck)
        self.drawing = sampler.begin(self._logits, self.step.rows, masks, self._extras.drawn)
        self._logits = None

    def land(self) -> Sequence[SampledToken]:
        """The tokens, once they are here."""
        return () if self.drawing is None else self.drawing.wait()

    def scores(self) -> Sequence[PromptLogprobs]:
        """Log probabilities of prompts, once they are here: one for each of the step's `scoring`."""
        return () if self._scores is None else self._scores.wait()
