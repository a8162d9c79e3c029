"""Which sequences a step computes, so that one that ends meanwhile keeps its pages until that step is over."""

from collections.abc import Iterable

from kvrail.engine.request.sequence import Sequence, Status
from kvrail.engine.schedule.scheduler import Scheduler, Work


class Computing:
    """The steps that compute now or will next, in order, by their sequences."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: list[set[Sequence]] = []
        self._doomed: set[Sequence] = set()  # to be finished when no step has them any more

    @property
    def idle(self) -> bool:
        """Whether no step computes."""
        return not self._steps

    def begin(self, work: Iterable[Work]) -> None:
        """A step has been planned."""
        self._steps.append({item.sequence for item in work})

    def land(self) -> None:
        """The first step is over."""
        self._steps.pop(0)
        self._finish_doomed()

    def abandon(self, count: int) -> None:
        """The last `count` steps are over without result."""
        del self._steps[len(self._steps) - count :]
        self._finish_doomed()

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out of the scheduler, now or when the steps that have it are over."""
        if self._has(sequence):
            self._doomed.add(sequence)
            sequence.status = Status.FINISHED
        elif sequence.status is not Status.FINISHED:
            self._scheduler.finish(sequence)

    def begin_again(self, sequence: Sequence) -> Sequence:
        """Queue a sequence once more, for other pages: a step that computes now may still write into these."""
        self._scheduler.drop_drafts(sequence)
        self.finish(sequence)
        fresh = sequence.once_more()
        self._scheduler.add(fresh)
        return fresh

    def _finish_doomed(self) -> None:
        for sequence in [s for s in self._doomed if not self._has(s)]:
            self._doomed.remove(sequence)
            self._scheduler.finish(sequence)

    def _has(self, sequence: Sequence) -> bool:
        return any(sequence in step for step in self._steps)
