"""What to compute next. Decides over sequences and pages; knows no tensors and no clock.

Each step has a budget of tokens. Decoding sequences come first, one token each, so that prefills never stall them. Then
drafts are verified, then made, one a sequence. Chunks of prompts share the rest: half of it goes to the oldest prompt,
the other half to the prompts that lack the fewest tokens. So short prompts do not wait for a long one, and the long one
still advances. Beside other work chunks may get less than that: decoding sequences wait for the step's end.

Waiting is first come, first served: no sequence overtakes the head of the queue, so none starves. The exception is a
request's sequences beyond its first. They leave an eighth of the places free and can be overtaken for these, so that
one request of many sequences does not delay the first tokens of others.

If a decoding sequence needs a page and there is none, drafts give up theirs, youngest first. If there are no drafts,
the youngest running sequence is preempted: it gives up its pages and returns to the head of the queue. It will compute
its KV again, or find it cached. Prompts that are computed for another worker keep their pages, since a transfer reads
them.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from kvrail.engine.kv.pages import PagePool
from kvrail.engine.request.sequence import Sequence, Status
from kvrail.engine.schedule.chunks import StepBudget, share
from kvrail.engine.schedule.cost import StepCostModel
from kvrail.engine.schedule.lossy_tables import tables_of
from kvrail.engine.schedule.tables import Prefix


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: `count` tokens behind the first `start` ones.

    drafts: the list to which the step adds a draft; None where it computes tokens rather than drafts. source: if the
    one token is not known yet, the row of the step before that draws it.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: list[int] | None = None
    source: int | None = None


class Scheduler:
    """Queue, running set and pages of one engine."""

    def __init__(self, pool: PagePool, budget: StepBudget) -> None:
        self.pool = pool
        self.budget = budget
        self._tables = tables_of(pool)
        self.cost = StepCostModel()
        self.preemptions = 0
        self.preemptions_of_ended: list[int] = []  # of each sequence, until somebody takes them
        self._waiting: deque[Sequence] = deque()
        self._siblings: deque[Sequence] = deque()  # of requests whose first sequence was admitted; they wait too
        self._running: list[Sequence] = []  # oldest arrival first
        self._receiving: list[Sequence] = []  # status RECEIVING or DRAFTING
        self._dropped: list[tuple[Sequence, int]] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages."""
        return len(self._waiting) + len(self._siblings)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages: computing, or waiting for their KV to arrive."""
        return len(self._running) + len(self._receiving)

    @property
    def num_receiving(self) -> int:
        """Running sequences that only wait for their KV: no step computes them."""
        return sum(sequence.status is Status.RECEIVING for sequence in self._receiving)

    @property
    def awaits_next_step(self) -> bool:
        """Whether KV is about to arrive: the first token is here, which is sent once the prompt is computed."""
        return any(s.output_ids for s in self._receiving)

    def has_work(self) -> bool:
        """Whether `schedule` could return anything now."""
        drafting = (s for s in self._receiving if s.status is Status.DRAFTING)
        if any(self._tables.ready(s, s.computed) for s in self._running):
            return True
        return any(self._tables.has_room(s, s.length()) for s in drafting) or self._next() is not None

    def can_wait(self) -> bool:
        """Whether the queue has room for one more request."""
        return len(self._waiting) < self.budget.max_waiting

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """Queue a sequence; one that has run already comes first."""
        queue = self._queue_of(sequence)
        (queue.appendleft if first else queue.append)(sequence)

    def admit(self) -> list[Sequence]:
        """Give pages to waiting sequences, in order, as long as they fit. Returns those that were admitted."""
        admitted: list[Sequence] = []
        while (found := self._next()) is not None:
            sequence, prefix = found
            self._queue_of(sequence).popleft()
            if self._tables.take(sequence, prefix):
                sequence.status = Status.RECEIVING
                self._receiving.append(sequence)
            else:
                self._run(sequence)
            admitted.append(sequence)
        return admitted

    def schedule(self) -> list[Work]:
        """The next step's work, in the order that the module's docstring gives.

        Takes pages, may drop drafts and preempt.
        """
        work = self._decodes()
        budget = self.budget.max_batch_tokens - len(work)
        drafted = [s for s in self._running if s.drafts and self._tables.ready(s, s.computed)]
        for number, sequence in enumerate(drafted):
            if budget < sequence.to_compute() and (number or not budget):
                break  # the next step begins with this one
            if self._fit_drafts(sequence, budget):
                work.append(Work(sequence, sequence.computed, sequence.to_compute()))
                budget -= work[-1].count
        for sequence in self._receiving:
            if budget and sequence.status is Status.DRAFTING and self._tables.extend(sequence, sequence.length()):
                work.append(Work(sequence, sequence.length() - 1, 1, sequence.drafts))
                budget -= 1
        prompts = [(s, s.computed) for s in self._running if not s.is_decoding() and not s.drafts]
        return work + self._chunks(prompts, self._chunk_tokens(self.budget.max_batch_tokens - budget))

    def schedule_ahead(
        self, current: Iterable[Work], rows: Mapping[Sequence, int], ending: Container[Sequence]
    ) -> list[Work] | None:
        """The work of the step behind `current`, which computes now. Tokens that `current` draws come first.

        rows: the row of `current` that draws a sequence's next token or draft. ending: sequences whose next token or
        draft is their last. None if the next step cannot be planned yet: drafts must be verified, or pages are short.
        Takes pages.
        """
        current = list(current)
        made = {item.sequence: item.drafts for item in current if item.drafts is not None}
        if any(s.drafts or s in made for s in self._running):
            return None
        after = {item.sequence: item.start + item.count for item in current}
        alive = [s for s in self._running if s.status is Status.RUNNING and s not in ending]
        work = [Work(s, after[s], 1, source=rows[s]) for s in alive if s in rows and self._tables.ready(s, after[s])]
        known = [s for s in alive if s not in rows and s.output_ids]  # drawn elsewhere, or just admitted
        last = [s for s in known if after.get(s, s.computed) == len(s.token_ids) - 1]
        work += [Work(s, len(s.token_ids) - 1, 1) for s in last if self._tables.ready(s, len(s.token_ids) - 1)]
        missing = sum(self._tables.missing(item.sequence, item.start + 1) for item in work)
        if len(work) > self.budget.max_batch_tokens or not self.pool.can_allocate(missing):
            return None
        for item in work:
            self._tables.extend(item.sequence, item.start + 1)
        for s in [s for s in self._receiving if s.status is Status.DRAFTING and s not in ending]:
            continues = made.get(s) is s.drafts  # otherwise the draft in flight does not count
            start = after[s] if continues else s.length() - 1
            if len(work) < self.budget.max_batch_tokens and self._tables.extend(s, start + 1):
                work.append(Work(s, start, 1, s.drafts, rows[s] if continues else None))
        work.sort(key=lambda item: item.source is None)
        decoding = {item.sequence for item in work}
        prompts = [(s, after.get(s, s.computed)) for s in alive if s not in decoding]
        return work + self._chunks(prompts, self._chunk_tokens(len(work)))

    def computed(self, work: Iterable[Work]) -> None:
        """A step's KV is in the pages; full pages enter the prefix cache.

        Called once the tokens that the step drew are appended: KV of rejected drafts lies at or behind the last of
        them and does not count.
        """
        for item in work:
            sequence = item.sequence
            if sequence.status is Status.RUNNING and item.drafts is None:
                valid = len(sequence.token_ids) - bool(sequence.output_ids)
                sequence.computed = min(item.start + item.count, valid)
                self._tables.forget_copied(sequence)
                self._tables.publish(sequence)
                self._tables.shrink(sequence, len(sequence.token_ids))

    def hand_over(self, receiving: Sequence, heir: Sequence) -> None:
        """Let `heir`, another sequence of the request, await the KV instead; it takes over the pages."""
        if heir is receiving:
            return
        self._receiving[self._receiving.index(receiving)] = heir
        heir.status, receiving.status = Status.RECEIVING, Status.FINISHED
        heir.page_table, receiving.page_table = receiving.page_table, []
        heir.computed, heir.published, heir.borrowed = receiving.computed, receiving.published, receiving.borrowed
        heir.closed = receiving.closed

    def received(self, sequence: Sequence) -> None:
        """A transfer has filled the prompt's pages: the sequence runs; first, its drafts are verified."""
        self._receiving.remove(sequence)
        sequence.computed, sequence.borrowed = len(sequence.prompt_ids), True
        self._tables.publish(sequence)
        self._run(sequence)

    def drop_drafts(self, sequence: Sequence) -> None:
        """Forget a sequence's drafts and make no more; see `take_dropped`."""
        if sequence.status is Status.DRAFTING:
            sequence.status = Status.RECEIVING
        if sequence.drafts:
            self._dropped.append((sequence, len(sequence.drafts)))
        sequence.drafts = []  # a new list: a step in flight adds its draft to the old one

    def take_dropped(self) -> list[tuple[Sequence, int]]:
        """Sequences whose drafts were dropped since the last call, and how many drafts."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def compute_here(self, sequence: Sequence) -> bool:
        """A transfer failed for good: compute the prompt's missing KV here, in the pages that the sequence holds.

        False if the prompt cannot read these: then nothing but its drafts has changed.
        """
        self.drop_drafts(sequence)
        if not self._tables.can_compute(sequence):
            return False
        self._receiving.remove(sequence)
        sequence.remote = False
        self._run(sequence)
        return True

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is, and release its pages."""
        for place in (self._running, self._receiving, self._waiting, self._siblings):
            if sequence in place:
                place.remove(sequence)
        sequence.status = Status.FINISHED
        self.preemptions_of_ended.append(sequence.preemptions)
        self._tables.release(sequence)

    def check(self) -> None:
        """Raise AssertionError unless the pages add up and only admitted sequences hold some."""
        self.pool.check()
        self._tables.check([*self._running, *self._receiving])
        waiting = (*self._waiting, *self._siblings)
        assert all(not sequence.page_table for sequence in waiting), "a waiting sequence holds pages"

    def _queue_of(self, sequence: Sequence) -> deque[Sequence]:
        return self._waiting if sequence.leads else self._siblings

    def _next(self) -> tuple[Sequence, Prefix] | None:
        """The waiting sequence that comes first, if it can have its pages now, and what it begins with."""
        most = self.budget.max_running
        places = (self._waiting, most), (self._siblings, most - most // 8)
        heads = [queue[0] for queue, count in places if queue and self.num_running < count]
        heads = [sequence for sequence in heads if sequence.leads or not self._is_begun(sequence)]
        first = min(heads, key=lambda sequence: sequence.arrival, default=None)
        if first is None:
            return None
        decoding = sum(1 for s in self._running if s.is_decoding())  # each may need one more page at the next step
        others = [s for s in self._running if s.request_id == first.request_id]
        beside = decoding if self.num_running else 0
        prefixes = self._tables.prefixes(first, others)
        return next(((first, prefix) for prefix in prefixes if self._tables.fits(first, prefix, beside)), None)

    def _is_begun(self, sequence: Sequence) -> bool:
        """Whether another sequence of the request computes their prompt; this one can share its last page soon."""
        others = (s for s in self._running if s.request_id == sequence.request_id)
        return any(s.computed < len(s.prompt_ids) for s in others)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self._running.append(sequence)
        self._running.sort(key=lambda s: s.arrival)

    def _decodes(self) -> list[Work]:
        """The newest token of every decoding sequence, within the budget."""
        chosen: list[Sequence] = []
        for sequence in [s for s in self._running if s.is_decoding() and self._tables.ready(s, s.computed)]:
            if len(chosen) == self.budget.max_batch_tokens:
                break
            if sequence.status is Status.RUNNING and self._grow(sequence):
                chosen.append(sequence)
        # A later one may have preempted an earlier one.
        return [Work(s, s.computed, 1) for s in chosen if s.status is Status.RUNNING]

    def _chunk_tokens(self, others: int) -> int:
        """Tokens of prompts in a step that computes `others` beside them."""
        beside = bool(others or self._receiving)
        return self.budget.chunk_tokens(others, beside=beside, cost=self.cost)

    def _chunks(self, prompts: list[tuple[Sequence, int]], tokens: int) -> list[Work]:
        """Chunks of prompts; see chunks.share."""
        ends = [self._tables.end(*prompt) for prompt in prompts]
        counts = share(prompts, ends, tokens, self.budget.prompt_rows)
        return [Work(*prompt, count) for prompt, count in zip(prompts, counts, strict=True) if count]

    def _fit_drafts(self, sequence: Sequence, budget: int) -> bool:
        """Keep as many drafts as pages and `budget` tokens allow; False if none are left to be verified."""
        self._tables.extend(sequence, sequence.length())
        in_pages = self._tables.end(sequence, sequence.computed) - len(sequence.token_ids)
        room = min(in_pages, budget - sequence.to_compute() + len(sequence.drafts))
        if room <= 0:
            self.drop_drafts(sequence)
        del sequence.drafts[max(room, 0) :]
        return bool(sequence.drafts)

    def _reclaim(self) -> bool:
        """Take the youngest drafts' pages; False if no sequence that awaits KV holds more than the prompt's."""
        for sequence in reversed(self._receiving):
            if self._tables.shrink(sequence, len(sequence.prompt_ids)):
                self.drop_drafts(sequence)
                return True
        return False

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the sequence's next token, preempting younger ones; False if it was preempted itself."""
        while not self._tables.extend(sequence, len(sequence.token_ids)):
            if not self._reclaim():
                self._preempt(victim := next(s for s in reversed(self._running) if not s.prefill_only))
                if victim is sequence:
                    return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.drop_drafts(sequence)
        self._running.remove(sequence)
        self._wait_again(sequence)
        self.preemptions += 1
        sequence.preemptions += 1

    def _wait_again(self, sequence: Sequence) -> None:
        """Give up all pages and return to the head of the queue. Whatever it lacks then is computed here."""
        self._tables.release(sequence)
        sequence.remote = False  # whether it awaits KV is reported once, at its first admission
        sequence.computed = sequence.published = 0
        sequence.status = Status.WAITING
        self._queue_of(sequence).appendleft(sequence)
