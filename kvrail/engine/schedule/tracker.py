"""Every request of one engine, and each change of its state.

    open ──▶ waiting ──▶ running ─────────────────▶ ended
                │           ▲
                └──▶ receiving, drafting                  where another worker computes the prompt

A method is one change: a request is opened, gets pages, gets tokens or KV from another worker, is computed by a step,
gets that step's tokens, ends. The scheduler holds the queues and the pages. Nothing here locks, computes or waits: the
engine calls it with its lock held. What the request's caller learns of a change is an event; see `take_events`.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvrail.engine.batch.batch import NOT_DRAWN, SampledToken
from kvrail.engine.kv.leases import Leases
from kvrail.engine.request.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    Prefilled,
    PrefillStarted,
    Recomputed,
    Verified,
)
from kvrail.engine.request.requests import EngineRequest, ModelLimits
from kvrail.engine.request.sequence import Sequence as Seq
from kvrail.engine.request.sequence import Status
from kvrail.engine.schedule.output import NewToken, ending_of, ends_by_length
from kvrail.engine.schedule.planning import Step, draws_ahead, plan_step
from kvrail.engine.schedule.request_state import RequestState
from kvrail.engine.schedule.scheduler import Scheduler, Work
from kvrail.engine.schedule.scoring import prompt_scores
from kvrail.engine.schedule.speculation import Draft, Drafting
from kvrail.errors import InvalidRequestError, KvrailError
from kvrail.telemetry.worker import EngineMetrics
from kvrail.text import Tokenizer
from kvrail.values.pagehash import PageHash
from kvrail.values.sampling import PromptLogprobs

_NO_LOGITS = KvrailError("the model gave no finite logits, so that no token can be drawn; check its weights")


class RequestTracker:
    """All live requests of one engine. max_drafts: most tokens that a sequence drafts; 0 turns drafting off."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics,
        max_drafts: int,
    ) -> None:
        self.leases = Leases(scheduler.pool)
        self._scheduler = scheduler
        self._limits = limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._drafting = Drafting(limits, metrics, max_drafts)
        self._requests: dict[str, RequestState] = {}
        self._arrivals = 0
        self._steps = 0  # in flight
        self._drawn: list[tuple[Seq, NewToken | Draft | Verified]] = []  # their text is still to be made
        self._events: list[tuple[str, Event]] = []

    @property
    def idle(self) -> bool:
        """Whether no request is live, no step computes and no transfer holds pages."""
        return not self._requests and not self._steps and not self.leases.any

    @property
    def owes_a_step(self) -> bool:
        """Whether requests wait for a step. A transfer may be what they wait for, or hold the pages that they need."""
        return bool(self._requests) and not self.leases.any

    @property
    def has_drawn(self) -> bool:
        """Whether `emit_drawn` would add events."""
        return bool(self._drawn)

    def ids(self) -> list[str]:
        """Ids of all live requests."""
        return list(self._requests)

    def take_events(self) -> list[tuple[str, Event]]:
        """The events since the last call, in the order of the changes."""
        events, self._events = self._events, []
        return events

    # -- requests come and go ------------------------------------------------------------------------------------

    def open(self, request: EngineRequest, hashes: Sequence[PageHash]) -> None:
        """Take in a request and queue the sequence that computes the prompt. hashes: of the prompt's full pages."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        state = RequestState(request, hashes, self._tokenizer, unfinished=request.params.n)
        self._requests[request.request_id] = state
        for resumed in request.resumed or [None]:
            state.add_sequence(self._next_arrival(), resumed)
        alive = state.alive()
        # One without a token, if there is one: all of those get their first one with the prompt's logits.
        first = min(alive, key=lambda sequence: bool(sequence.output_ids))
        first.leads = True
        state.deferred = [sequence for sequence in alive if sequence is not first]
        state.unfinished -= len(state.sequences) - len(alive)
        self._scheduler.add(first)

    def admit(self) -> None:
        """Give pages to waiting requests."""
        for sequence in self._scheduler.admit():
            state = self._requests[sequence.request_id]
            if state.admitted:
                continue  # preempted before, or one of the other n - 1
            state.admitted = True
            awaits_kv = sequence.status is Status.RECEIVING
            if awaits_kv or sequence.prefill_only:
                self.leases.take(sequence.request_id, sequence.page_table)
            self._metrics.prefix_queried_tokens.inc(len(sequence.prompt_ids))
            self._metrics.prefix_hit_tokens.inc(sequence.computed)
            self._events.append((sequence.request_id, Admitted(sequence.computed, awaits_kv)))

    def close(self, request_id: str) -> None:
        """The caller has left: drop the request, and its lease if no transfer claimed that. No event follows."""
        self._drop(request_id)
        self.leases.drop(request_id)

    def fail(self, request_ids: Iterable[str], error: KvrailError) -> None:
        """Drop these requests, as far as they are live, and report why."""
        for request_id in request_ids:
            if self._drop(request_id):
                self._events.append((request_id, Failed(error)))

    def report_lost(self, error: KvrailError) -> None:
        """Report that every request has failed. Changes nothing else: the state can no longer be trusted."""
        self._events += [(request_id, Failed(error)) for request_id in self._requests]

    # -- transfers -----------------------------------------------------------------------------------------------

    def receive_first_tokens(self, request_id: str, tokens: Sequence[SampledToken]) -> None:
        """The first token of each of the n sequences, drawn by the prefill worker; their output is emitted at once.

        A sequence that lives on takes over the pages that await KV. Unknown ids are ignored, here and below.
        """
        state = self._requests.get(request_id)
        if state is None:
            return
        first = state.sequences[0]
        if not first.output_ids:  # otherwise this is a second prefill of the request, whose first tokens are known
            self._append_first(state, tokens)
            if alive := state.alive():
                self._scheduler.hand_over(first, alive[0])
                state.deferred = alive[1:]
            self._end_finished(state)
            self.emit_drawn(request_id)
            if request_id in self._requests and state.receiving() is None:
                self._queue_deferred(state)  # a stop string ended the heir: the others await no transfer
        self._begin_drafting(state)

    def receive_coarse_kv(self, request_id: str) -> None:
        """The prompt's pages hold a coarse form of its KV: once the first token is here, the request drafts on it.

        A request with n > 1 does not draft.
        """
        if state := self._requests.get(request_id):
            state.coarse = True
            self._begin_drafting(state)

    def receive_kv(self, request_id: str) -> None:
        """A transfer has filled the prompt's pages exactly; the first tokens came before it. Drafts are verified."""
        if (state := self._requests.get(request_id)) and (sequence := state.receiving()):
            self._scheduler.received(sequence)
            self._queue_deferred(state)

    def drop_drafts(self, request_id: str) -> None:
        """Another transfer begins to overwrite the pages: forget the drafts, make none before `receive_coarse_kv`."""
        if (state := self._requests.get(request_id)) and (sequence := state.receiving()):
            state.coarse = False
            self._scheduler.drop_drafts(sequence)
            self._report_dropped()

    def compute_here(self, request_id: str) -> None:
        """A transfer failed for good: forget the drafts and compute the prompt's KV in this engine."""
        if (state := self._requests.get(request_id)) and (sequence := state.receiving()):
            if not self._scheduler.compute_here(sequence):
                self._begin_again(sequence, solitary=False)
            self._report_dropped()
            self._queue_deferred(state)

    # -- steps ---------------------------------------------------------------------------------------------------

    def plan(self) -> Step:
        """Admit what fits, and plan the next step."""
        self.admit()
        work = self._scheduler.schedule()
        self._report_dropped()
        return self._begin(work)

    def plan_ahead(self, step: Step) -> Step | None:
        """Admit what fits, and plan the step behind `step`, which computes now; None if it depends on what that draws.

        A sequence that ends for a reason that cannot be foreseen is in it all the same; what it draws is dropped.
        """
        self.admit()
        ending: set[Seq] = set()
        for sequence in step.drawn_for:
            if sequence.prefill_only or ends_by_length(sequence, self._limits) or self._drafting.fills(sequence):
                ending.add(sequence)
            elif not draws_ahead(sequence):
                return None
        rows = {sequence: row for row, sequence in enumerate(step.drawn_for)}
        work = self._scheduler.schedule_ahead(step.work, rows, ending)
        return self._begin(work) if work else None

    def settle(self, step: Step, tokens: Sequence[SampledToken], scores: Sequence[PromptLogprobs] = ()) -> None:
        """A step is over: take in its tokens, log probabilities and KV; end what has ended in it or meanwhile."""
        drawn = step.draws(tokens)
        scored, broken = prompt_scores(step.scoring, scores)
        self._events += scored
        for sequence in broken:
            self._fail_without_logits(sequence)
        self._fail_undrawn(step, drawn)
        kept = sum(self._append_drawn(item, drawn[item.sequence]) for item in step.work if item.sequence in drawn)
        self._metrics.generation_tokens.inc(kept)
        self._scheduler.computed(step.work)
        self.abandon([step])
        for sequence, new in drawn.items():
            if sequence.status is not Status.RUNNING:
                continue
            if sequence.prefill_only:
                self._drop(sequence.request_id)
                self._events.append((sequence.request_id, Prefilled(tuple(new))))
            else:
                self._end_finished(self._requests[sequence.request_id])

    def abandon(self, steps: Iterable[Step]) -> None:
        """These steps compute no longer: release the pages of sequences that ended meanwhile."""
        for step in steps:
            self._steps -= 1
            for item in step.work:
                item.sequence.steps -= 1
                if item.sequence.status is Status.FINISHED and not item.sequence.steps:
                    self._scheduler.finish(item.sequence)

    def emit_drawn(self, request_id: str | None = None) -> None:
        """Make the text and events of all that was drawn since the last call, or of one request's."""
        now = [(s, t) for s, t in self._drawn if request_id in (None, s.request_id)]
        self._drawn = [] if request_id is None else [(s, t) for s, t in self._drawn if s.request_id != request_id]
        for sequence, drawn in now:
            if (state := self._requests.get(sequence.request_id)) is None:
                continue  # it has ended: a stop string cuts off the accepted drafts behind it
            if isinstance(drawn, NewToken):
                self._emit_token(state, sequence, drawn)
            elif isinstance(drawn, Draft):
                self._events.append((sequence.request_id, state.drafted(sequence, drawn)))
            else:
                state.end_drafts()
                self._events.append((sequence.request_id, drawn))

    # -- details -------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _begin_drafting(self, state: RequestState) -> None:
        """Draft if the first token and coarse KV are both here."""
        sequence = state.receiving()
        if sequence is not None and state.coarse and self._drafting.can_begin(sequence):
            sequence.status = Status.DRAFTING

    def _queue_deferred(self, state: RequestState) -> None:
        for sequence in state.deferred:
            self._scheduler.add(sequence)
        state.deferred = []

    def _drop(self, request_id: str) -> bool:
        """Forget a request and release its pages; False where it is not live."""
        state = self._requests.pop(request_id, None)
        for sequence in state.sequences if state else ():
            self._end(sequence)
        return state is not None

    def _end(self, sequence: Seq) -> None:
        """End a sequence. It keeps its pages until no step that is in flight computes it."""
        if sequence.steps:
            sequence.status = Status.FINISHED
        elif sequence.status is not Status.FINISHED:
            self._scheduler.finish(sequence)

    def _end_finished(self, state: RequestState) -> None:
        for sequence in state.sequences:
            if sequence.finish_reason is not None:
                self._end(sequence)

    def _begin(self, work: list[Work]) -> Step:
        """A step with this work is in flight from now on."""
        self._steps += bool(work)
        for item in work:
            item.sequence.steps += 1
            state = self._requests[item.sequence.request_id]
            if not state.prefill_started and item.drafts is None:
                state.prefill_started = True
                self._events.append((item.sequence.request_id, PrefillStarted()))
        return plan_step(work, self._scheduler.pool.page_size, self._limits.eos_token_ids)

    def _fail_undrawn(self, step: Step, drawn: Mapping[Seq, Sequence[SampledToken]]) -> None:
        """Fail the requests for which nothing could be drawn; where it was a draft, the drafts alone are dropped."""
        alive = [s for s in drawn if s.status is not Status.FINISHED]
        undrawn = {s for s in alive if any(token.token_id == NOT_DRAWN for token in drawn[s])}
        drafting = {item.sequence: item for item in step.work if item.drafts is not None}
        for sequence in undrawn & drafting.keys():
            if self._drafting.wants(drafting[sequence]):
                self.drop_drafts(sequence.request_id)
        for sequence in undrawn - drafting.keys():
            if (error := step.stuck.get(sequence)) is None:
                self._fail_without_logits(sequence)
            else:
                self.fail([sequence.request_id], error)
        self._report_dropped()

    def _fail_without_logits(self, sequence: Seq) -> None:
        """KV that gave no finite logits leaves the prefix cache; what had borrowed some computes all KV again."""
        self._scheduler.pool.forget([*sequence.page_table, *sequence.copied_pages])
        ended = sequence.status is Status.FINISHED  # with another sequence of its request
        if sequence.borrowed and not sequence.prefill_only and not ended:
            self._begin_again(sequence, solitary=True)
            self._events.append((sequence.request_id, Recomputed()))
        else:
            self.fail([sequence.request_id], _NO_LOGITS)

    def _begin_again(self, sequence: Seq, *, solitary: bool) -> None:
        """Queue a sequence again, for other pages: a step in flight may still read and write these."""
        self._scheduler.drop_drafts(sequence)
        self._end(sequence)
        fresh = self._requests[sequence.request_id].sequences[sequence.index] = sequence.once_more(solitary=solitary)
        self._scheduler.add(fresh, first=True)

    def _append_drawn(self, work: Work, new: Sequence[SampledToken]) -> int:
        """Take in what a step drew for one sequence; returns the number of tokens that were kept."""
        sequence = work.sequence
        if sequence.status is Status.FINISHED:
            return 0
        state = self._requests[sequence.request_id]
        if work.drafts is not None:
            token_id = new[0].token_id
            draft = None if token_id == NOT_DRAWN else self._drafting.add(work, token_id)
            if draft is not None and state.spec.provisional:
                self._drawn.append((sequence, draft))
            return 0
        if sequence.prefill_only:
            return len(new)
        if not sequence.output_ids:
            self._append_first(state, new)
            state.deferred = [s for s in state.alive() if s is not sequence]
            self._queue_deferred(state)
            return len(new)
        self._queue_deferred(state)
        if sequence.drafts:
            verdict, new = self._drafting.verify(sequence, new)
            self._drawn.append((sequence, verdict))
        before = len(sequence.output_ids)
        for token in new:
            if sequence.finish_reason is None:
                self._append(sequence, token)
        return len(sequence.output_ids) - before

    def _append_first(self, state: RequestState, tokens: Sequence[SampledToken]) -> None:
        """Give each of the n sequences its first token, making those that do not exist yet."""
        for index, token in enumerate(tokens):
            new = index >= len(state.sequences)
            sequence = state.add_sequence(self._next_arrival()) if new else state.sequences[index]
            if not sequence.output_ids and sequence.finish_reason is None:
                self._append(sequence, token)

    def _append(self, sequence: Seq, token: SampledToken) -> None:
        sequence.append(token.token_id)
        ending = ending_of(sequence, token.token_id, sequence.length(), self._limits)
        sequence.finish_reason = ending[0]
        self._drawn.append((sequence, NewToken(token, len(sequence.output_ids), ending)))

    def _report_dropped(self) -> None:
        """Report drafts that were dropped: none is accepted."""
        for sequence, count in self._scheduler.take_dropped():
            self._drawn.append((sequence, Verified(sequence.index, count, 0, dropped=True)))

    def _emit_token(self, state: RequestState, sequence: Seq, new: NewToken) -> None:
        """Emit a token with its text; a stop string that it completes ends the sequence."""
        output = state.output(sequence, new)
        self._events.append((sequence.request_id, output))
        if output.finish_reason is not None:
            sequence.finish_reason = output.finish_reason
            self._end(sequence)
            state.deferred = [s for s in state.deferred if s is not sequence]
            state.unfinished -= 1
        if not state.unfinished:
            del self._requests[sequence.request_id]
            self._events.append((sequence.request_id, Finished(state.completion_tokens)))
