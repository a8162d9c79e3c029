"""The engine's books: which request owns which sequences, and what each drawn token means for them.

Nothing here locks, computes or waits; the engine calls it with its lock held.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvrail.engine.batch.batch import NOT_DRAWN, SampledToken
from kvrail.engine.kv.leases import Leases
from kvrail.engine.request.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    Output,
    Prefilled,
    PrefillStarted,
    Recomputed,
    Verified,
)
from kvrail.engine.request.requests import EngineRequest, ModelLimits, Resumed
from kvrail.engine.request.sequence import Sequence as Seq
from kvrail.engine.request.sequence import Status
from kvrail.engine.schedule.computing import Computing
from kvrail.engine.schedule.live import LiveRequest
from kvrail.engine.schedule.output import Booked, SequenceText, ending_of, ends_by_length
from kvrail.engine.schedule.planning import Step, draws_ahead, plan_step
from kvrail.engine.schedule.scheduler import Scheduler, Work
from kvrail.engine.schedule.scoring import told
from kvrail.engine.schedule.speculation import Draft, Drafting, DraftText
from kvrail.errors import InvalidRequestError, KvrailError
from kvrail.telemetry.worker import EngineMetrics
from kvrail.text import Tokenizer
from kvrail.values.pagehash import PageHash
from kvrail.values.sampling import FinishReason, PromptLogprobs

Events = list[tuple[str, Event]]
_NO_LOGITS = KvrailError("the model gave no finite logits, so that no token can be drawn; check its weights")


class RequestBook:
    """All live requests of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics,
        max_drafts: int,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._drafting = Drafting(scheduler, limits, metrics, max_drafts)
        self._requests: dict[str, LiveRequest] = {}
        self._arrivals = 0
        self.leases = Leases(scheduler.pool)
        self._computing = Computing(scheduler)
        self._drawn: list[tuple[Seq, Booked | Draft | Verified]] = []  # not told yet, since text must be made first

    @property
    def idle(self) -> bool:
        """Whether no request is live, no step computes and no transfer holds pages."""
        return not self._requests and self._computing.idle and not self.leases.any

    @property
    def owes_a_step(self) -> bool:
        """Whether requests wait for a step. A transfer may be what they wait for, or hold the pages that they need."""
        return bool(self._requests) and not self.leases.any

    @property
    def has_drawn(self) -> bool:
        """Whether `emit_drawn` has something to tell."""
        return bool(self._drawn)

    def ids(self) -> list[str]:
        """Ids of all live requests."""
        return list(self._requests)

    # -- requests come and go ------------------------------------------------------------------------------------

    def open(self, request: EngineRequest, hashes: Sequence[PageHash]) -> None:
        """Take in a request and queue the sequence that computes the prompt. hashes: of the prompt's full pages."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        state = self._requests[request.request_id] = LiveRequest(request, hashes, unfinished=request.params.n)
        for resumed in request.resumed or [None]:
            self._new_sequence(state, resumed)
        alive = [sequence for sequence in state.sequences if sequence.finish_reason is None]
        # Who has no token yet: all that have none get their first one with the prompt's logits.
        first = min(alive, key=lambda sequence: bool(sequence.output_ids))
        first.leads = True
        state.deferred = [sequence for sequence in alive if sequence is not first]
        state.unfinished -= len(state.sequences) - len(alive)
        self._scheduler.add(first)

    def drop(self, request_id: str) -> bool:
        """Forget a request and release its pages; False where it is not live."""
        state = self._requests.pop(request_id, None)
        for sequence in state.sequences if state else ():
            self._computing.finish(sequence)
        return state is not None

    def fail(self, request_ids: Iterable[str], error: KvrailError) -> Events:
        """Drop requests and say why."""
        return [(request_id, Failed(error)) for request_id in request_ids if self.drop(request_id)]

    def admit(self) -> Events:
        """Give pages to waiting requests."""
        events: Events = []
        for sequence in self._scheduler.admit():
            state = self._requests[sequence.request_id]
            if state.announced:
                continue  # preempted before, or one of the other n - 1
            state.announced = True
            awaits_kv = sequence.status is Status.RECEIVING
            if awaits_kv or sequence.prefill_only:
                self.leases.take(sequence.request_id, sequence.page_table)
            self._metrics.prefix_queried_tokens.inc(len(sequence.prompt_ids))
            self._metrics.prefix_hit_tokens.inc(sequence.computed)
            events.append((sequence.request_id, Admitted(sequence.computed, awaits_kv)))
        return events

    def close(self, request_id: str) -> None:
        """Nobody listens to a request any more: drop it, and its lease if nobody claimed that."""
        self.drop(request_id)
        self.leases.drop(request_id)

    # -- transfers -----------------------------------------------------------------------------------------------

    def receive_first_tokens(self, request_id: str, tokens: Sequence[SampledToken]) -> Events:
        """First tokens drawn elsewhere. A sequence that lives on takes over the pages that await KV."""
        state = self._requests.get(request_id)
        if state is None or state.sequences[0].output_ids:
            return []  # gone, or a second prefill of the same request: its first tokens are known
        first = state.sequences[0]
        self._append_first(state, tokens)
        alive = [sequence for sequence in state.sequences if sequence.finish_reason is None]
        if alive:
            self._scheduler.hand_over(first, alive[0])
            state.deferred = alive[1:]
        self._finish_ended(state)
        events = self.emit_drawn(request_id)
        if request_id in self._requests and self._receiving(request_id) is None:
            self._queue_deferred(request_id)  # a stop string ended the heir: the others await no transfer
        return events

    def receive_coarse_kv(self, request_id: str) -> None:
        """A transfer has filled the prompt's pages with a coarse form of its KV."""
        if request_id in self._requests:
            self._requests[request_id].coarse = True
            self.begin_drafting(request_id)

    def begin_drafting(self, request_id: str) -> None:
        """Draft where coarse KV and the first token are here."""
        sequence = self._receiving(request_id)
        if sequence is not None and self._requests[request_id].coarse:
            self._drafting.begin(sequence)

    def drop_drafts(self, request_id: str) -> None:
        """The pages hold no coarse form any more, or soon won't."""
        sequence = self._receiving(request_id)
        if sequence is not None:
            self._requests[request_id].coarse = False
            self._scheduler.drop_drafts(sequence)
            self._withdraw_dropped()

    def receive_kv(self, request_id: str) -> None:
        """A transfer has filled the prompt's pages, exactly."""
        sequence = self._receiving(request_id)
        if sequence is not None:
            self._scheduler.received(sequence)
            self._queue_deferred(request_id)

    def compute_here(self, request_id: str) -> None:
        """A transfer failed for good."""
        sequence = self._receiving(request_id)
        if sequence is not None:
            self._scheduler.compute_here(sequence)
            self._withdraw_dropped()
            self._queue_deferred(request_id)

    # -- steps ---------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[Step, Events]:
        """The next step, and the requests whose prefill it starts."""
        work = self._scheduler.schedule()
        self._withdraw_dropped()
        return self._begin(work)

    def plan_ahead(self, step: Step) -> tuple[Step, Events] | None:
        """The step behind `step`, which computes now; None where it depends on what that draws.

        A sequence that ends for a reason that cannot be foreseen is in it all the same; what it draws is dropped.
        """
        ending: set[Seq] = set()
        for sequence in step.drawn_for:
            if sequence.prefill_only or ends_by_length(sequence, self._limits) or self._drafting.fills(sequence):
                ending.add(sequence)
            elif not draws_ahead(sequence):
                return None
        rows = {sequence: row for row, sequence in enumerate(step.drawn_for)}
        work = self._scheduler.schedule_ahead(step.work, rows, ending)
        return self._begin(work) if work else None

    def _begin(self, work: list[Work]) -> tuple[Step, Events]:
        events: Events = []
        if work:
            self._computing.begin(work)
        for item in work:
            state = self._requests[item.sequence.request_id]
            if not state.prefill_started and item.drafts is None:
                state.prefill_started = True
                events.append((item.sequence.request_id, PrefillStarted()))
        return plan_step(work, self._scheduler.pool.page_size, self._limits.eos_token_ids), events

    def settle(self, step: Step, tokens: Sequence[SampledToken], scores: Sequence[PromptLogprobs] = ()) -> Events:
        """Book a computed step: new tokens, prompts' log probabilities, KV, ends; finish what was dropped meanwhile."""
        drawn = step.draws(tokens)
        scored, broken = told(step.scoring, scores)
        events: Events = [*scored, *self.fail(broken, _NO_LOGITS), *self._fail_undrawn(step, drawn)]
        booked = sum(self._book(item, drawn[item.sequence]) for item in step.work if item.sequence in drawn)
        self._metrics.generation_tokens.inc(booked)
        self._scheduler.computed(step.work)
        self._computing.land()
        for sequence, new in drawn.items():
            if sequence.status is not Status.RUNNING:
                continue
            if sequence.prefill_only:
                self.drop(sequence.request_id)
                events.append((sequence.request_id, Prefilled(tuple(new))))
                continue
            self._finish_ended(self._requests[sequence.request_id])
        return events

    def _fail_undrawn(self, step: Step, drawn: Mapping[Seq, Sequence[SampledToken]]) -> Events:
        """Fail the requests for which nothing could be drawn; a draft that could not be made is no more than that.

        KV that gave no finite logits leaves the prefix cache; what a sequence had borrowed is computed once more.
        """
        alive = [s for s in drawn if s.status is not Status.FINISHED]
        undrawn = {s for s in alive if any(token.token_id == NOT_DRAWN for token in drawn[s])}
        drafting = {item.sequence: item for item in step.work if item.drafts is not None}
        for sequence in undrawn & drafting.keys():
            if self._drafting.wants(drafting[sequence]):
                self.drop_drafts(sequence.request_id)
        events: Events = []
        for sequence in undrawn - drafting.keys():
            if (error := step.stuck.get(sequence)) is None:
                self._scheduler.pool.forget([*sequence.page_table, *sequence.copied_pages])
            if error is None and sequence.borrowed and not sequence.prefill_only:
                self._requests[sequence.request_id].sequences[sequence.index] = self._computing.begin_again(sequence)
                events.append((sequence.request_id, Recomputed()))
            else:
                events += self.fail([sequence.request_id], error or _NO_LOGITS)
        self._withdraw_dropped()
        return events

    def abandon(self, steps: Sequence[Step]) -> None:
        """These steps, the last ones that were planned, are over without result."""
        self._computing.abandon(len(steps))

    def emit_drawn(self, request_id: str | None = None) -> Events:
        """All that was drawn since the last call, or for one request."""
        now = [(s, t) for s, t in self._drawn if request_id in (None, s.request_id)]
        self._drawn = [] if request_id is None else [(s, t) for s, t in self._drawn if s.request_id != request_id]
        return [event for sequence, token in now for event in self._emit(sequence, token)]

    # -- details -------------------------------------------------------------------------------------------------

    def _new_sequence(self, state: LiveRequest, resumed: Resumed | None = None) -> Seq:
        spec, index = state.spec, len(state.sequences)
        self._arrivals += 1
        sequence = Seq(
            spec.request_id,
            index,
            spec.params,
            list(spec.prompt_ids),
            self._arrivals,
            False,
            spec.remote,
            spec.local_tokens,
            spec.prefill_only,
            spec.space,
            list(resumed.token_ids) if resumed else [],
            known_hashes=list(state.hashes),
            matcher=None if spec.grammar is None else spec.grammar.matcher(),
            scored=len(spec.prompt_ids) if index else spec.scored,
        )
        state.sequences.append(sequence)
        text = None if self._tokenizer is None or spec.prefill_only else SequenceText(self._tokenizer, sequence)
        state.texts.append(text)
        if resumed and resumed.ended:
            sequence.finish_reason, sequence.status = FinishReason.STOP, Status.FINISHED
        elif resumed and resumed.token_ids and text is not None:
            text.resume(resumed.token_ids)
        return sequence

    def _receiving(self, request_id: str) -> Seq | None:
        state = self._requests.get(request_id)
        awaiting = (Status.RECEIVING, Status.DRAFTING)
        return next((s for s in state.sequences if s.status in awaiting), None) if state else None

    def _finish_ended(self, state: LiveRequest) -> None:
        for sequence in state.sequences:
            if sequence.finish_reason is not None:
                self._computing.finish(sequence)

    def _queue_deferred(self, request_id: str) -> None:
        state = self._requests[request_id]
        for sequence in state.deferred:
            self._scheduler.add(sequence)
        state.deferred = []

    def _append_first(self, state: LiveRequest, tokens: Sequence[SampledToken]) -> None:
        """Give each of the n sequences its first token, making those that do not exist yet."""
        for index, token in enumerate(tokens):
            sequence = state.sequences[index] if index < len(state.sequences) else self._new_sequence(state)
            if not sequence.output_ids and sequence.finish_reason is None:
                self._append(sequence, token)

    def _book(self, work: Work, new: Sequence[SampledToken]) -> int:
        """Take in what a step drew for one sequence; returns how many tokens of it stand."""
        sequence = work.sequence
        if sequence.status is Status.FINISHED:
            return 0
        state = self._requests[sequence.request_id]
        if work.drafts is not None:
            self._book_draft(work, new[0].token_id, told=state.spec.provisional)
            return 0
        if sequence.prefill_only:
            return len(new)
        if not sequence.output_ids:
            self._append_first(state, new)
            state.deferred = [s for s in state.sequences if s is not sequence and s.finish_reason is None]
            self._queue_deferred(sequence.request_id)
            return len(new)
        if state.deferred:
            self._queue_deferred(sequence.request_id)
        if sequence.drafts:
            verdict, new = self._drafting.verify(sequence, new)
            self._drawn.append((sequence, verdict))
        before = len(sequence.output_ids)
        for token in new:
            if sequence.finish_reason is None:
                self._append(sequence, token)
        return len(sequence.output_ids) - before

    def _book_draft(self, work: Work, token_id: int, *, told: bool) -> None:
        draft = None if token_id == NOT_DRAWN else self._drafting.add(work, token_id)
        if draft is not None and told:
            self._drawn.append((work.sequence, draft))

    def _append(self, sequence: Seq, token: SampledToken) -> None:
        sequence.append(token.token_id)
        ending = ending_of(sequence, token.token_id, sequence.length(), self._limits)
        sequence.finish_reason = ending[0]
        self._drawn.append((sequence, Booked(token, len(sequence.output_ids), ending)))

    def _withdraw_dropped(self) -> None:
        """Have it reported which drafts were dropped."""
        for sequence, count in self._scheduler.take_dropped():
            self._drawn.append((sequence, Verified(sequence.index, count, 0)))

    def _emit(self, sequence: Seq, drawn: Booked | Draft | Verified) -> Events:
        """Tell what was drawn, unless its request has ended: a stop string cuts off accepted drafts behind it."""
        state = self._requests.get(sequence.request_id)
        if state is None:
            return []
        if isinstance(drawn, Booked):
            return self._emit_token(state, sequence, drawn)
        if isinstance(drawn, Verified):
            state.draft_text = None
            return [(sequence.request_id, drawn)]
        if state.draft_text is None:
            state.draft_text = DraftText(self._tokenizer, sequence)
        return [(sequence.request_id, state.draft_text.push(drawn))]

    def _emit_token(self, state: LiveRequest, sequence: Seq, booked: Booked) -> Events:
        """Output of one token, with its text; a stop string that it completes ends the sequence."""
        token = booked.token
        logprobs = () if token.logprobs is None else (token.logprobs,)
        text = state.texts[sequence.index]
        if text is None:
            output = Output(sequence.index, (token.token_id,), "", logprobs, *booked.ending)
        else:
            output = text.push((token.token_id,), logprobs, booked.count, booked.ending)
        state.completion_tokens += 1
        events: Events = [(sequence.request_id, output)]
        if output.finish_reason is not None:
            sequence.finish_reason = output.finish_reason
            self._computing.finish(sequence)
            state.deferred = [s for s in state.deferred if s is not sequence]
            state.unfinished -= 1
        if not state.unfinished:
            del self._requests[sequence.request_id]
            events.append((sequence.request_id, Finished(state.completion_tokens)))
        return events
