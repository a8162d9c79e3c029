"""A step that the device computes.

its draws are enqueued       the step behind it can be enqueued too, fed from these draws
they are not enqueued yet    a grammar decides, and its masks depend on the tokens of the step before: they are found
                             once that one has landed, while the device computes this one
"""

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from kvrail.engine.batch.batch import Extras, SampledToken
from kvrail.engine.batch.readback import Enqueued
from kvrail.engine.sampling.logprobs import Scores
from kvrail.engine.sampling.masks import MaskFinder, Masks
from kvrail.engine.sampling.sampler import PendingSample, Sampler
from kvrail.engine.schedule.planning import Step
from kvrail.values.sampling import PromptLogprobs


class InFlightStep:
    """A step that the device has. begin: when the device got it, in seconds of perf_counter.

    logits, extras: what it computes; `logits` are valid until it gets the next step.
    """

    def __init__(
        self, step: Step, begin: float, masks: "Future[Masks] | None", logits: torch.Tensor, extras: Extras
    ) -> None:
        self.step = step
        self.begin = begin
        self.sample: PendingSample | None = None
        self._masks = masks
        self._logits: torch.Tensor | None = None
        self._end: Enqueued | None = None  # where nothing is drawn
        self._extras = extras
        self._scores = Scores(logits, step.scoring) if step.scoring else None
        rows = step.logit_rows
        if rows:
            # Equal counts would not do: a prompt's row can serve n draws.
            in_order = rows == list(range(logits.shape[0]))
            self._logits = logits if in_order else logits[rows]
        else:
            self._end = Enqueued(logits.device)

    @property
    def undrawn(self) -> bool:
        """Whether `draw` is still to be called."""
        return self._logits is not None

    @property
    def near_end(self) -> torch.cuda.Event | None:
        """The event that little of the step is left, if it has one."""
        return self._extras.near_end

    def find_masks(self, finder: MaskFinder) -> None:
        """Begin to find the masks: every token before the rows is known now."""
        if self.undrawn:
            self._masks = finder.begin(self.step)

    def draw(self, sampler: Sampler) -> None:
        """Enqueue the draws, once the masks are here."""
        if self._logits is None:
            return
        masks = None if self._masks is None else self._masks.result()
        if masks is not None:
            self.step.stuck.update(masks.stuck)
        self.sample = sampler.begin(self._logits, self.step.rows, masks, self._extras.drawn)
        self._logits = None

    def land(self) -> Sequence[SampledToken]:
        """Wait for the step's end, and for the tokens that it draws. Before it, a transfer could read its pages."""
        if self._end is not None:
            self._end.wait()
        return () if self.sample is None else self.sample.wait()

    def scores(self) -> Sequence[PromptLogprobs]:
        """Wait for the log probabilities of prompts: one for each of the step's `scoring`."""
        return () if self._scores is None else self._scores.wait()
