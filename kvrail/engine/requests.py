"""The engine's books: which request owns which sequences, and what each drawn token means for them.

Nothing here locks, computes or waits; the engine calls it with its lock held.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrail.engine.batch import SampledToken, SampleRow, SequenceSlice
from kvrail.engine.events import Admitted, Event, Failed, Finished, Output, PageLease, Prefilled, PrefillStarted
from kvrail.engine.output import SequenceText, banned_tokens, ending_of
from kvrail.engine.scheduler import Scheduler, Work
from kvrail.engine.sequence import Sequence as Seq
from kvrail.engine.sequence import Status
from kvrail.errors import ContextLengthError, InvalidRequestError, KvrailError
from kvrail.metrics import EngineMetrics
from kvrail.sampling import FinishReason, SamplingParams
from kvrail.text import Tokenizer

Events = list[tuple[str, Event]]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue.

    remote: another worker computes the prompt's KV, unless little of it is missing. prefill_only: draw the first
    tokens, compute nothing further. resumed_ids: output that another engine generated before; it is continued.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    remote: bool = False
    prefill_only: bool = False
    resumed_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenPages:
    """Pages of a prefill-only request that a step completes: logical numbers first_page to end_page - 1."""

    request_id: str
    first_page: int
    end_page: int


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class Step:
    """One step: the scheduler's work as slices for the runner and rows for the sampler.

    logit_rows: for each row, which row of the runner's logits it draws from; a prompt's logits serve n rows.
    """

    work: list[Work]
    slices: list[SequenceSlice] = field(default_factory=list)
    written: list[WrittenPages] = field(default_factory=list)
    rows: list[SampleRow] = field(default_factory=list)
    drawn_for: list[Seq] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    spec: EngineRequest
    unfinished: int
    sequences: list[Seq] = field(default_factory=list)
    texts: list[SequenceText | None] = field(default_factory=list)
    deferred: list[Seq] = field(default_factory=list)  # begun, but not queued before the prompt's KV is here
    announced: bool = False
    prefill_started: bool = False
    completion_tokens: int = 0


class RequestBook:
    """All live requests of one engine."""

    def __init__(
        self, scheduler: Scheduler, limits: ModelLimits, tokenizer: Tokenizer | None, metrics: EngineMetrics
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._requests: dict[str, _Request] = {}
        self._arrivals = 0
        self._unclaimed: dict[str, PageLease] = {}
        self._claimed = 0
        self._computing: set[Seq] = set()  # sequences of the step that computes now
        self._doomed: set[Seq] = set()  # of these, the ones to finish when it is over
        self._drawn: list[tuple[Seq, SampledToken]] = []  # booked, their text not made yet

    @property
    def idle(self) -> bool:
        """Whether no request is live, no step computes and no transfer holds pages."""
        return not self._requests and not self._computing and not self._unclaimed and not self._claimed

    @property
    def has_drawn(self) -> bool:
        """Whether tokens wait for their text."""
        return bool(self._drawn)

    def ids(self) -> list[str]:
        """Ids of all live requests."""
        return list(self._requests)

    # -- requests come and go ------------------------------------------------------------------------------------

    def validate(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError or ContextLengthError where the request can never be served."""
        limits, prompt = self._limits, request.prompt_ids
        if not prompt:
            raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
        if request.resumed_ids and (request.params.n > 1 or len(request.resumed_ids) >= request.params.max_tokens):
            raise InvalidRequestError(
                f"{len(request.resumed_ids)} tokens cannot be resumed with n {request.params.n} and max_tokens"
                f" {request.params.max_tokens}",
                param="resumed_token_ids",
            )
        outside = [token for token in (*prompt, *request.resumed_ids) if not 0 <= token < limits.vocab_size]
        if outside:
            raise InvalidRequestError(
                f"token id {outside[0]} is outside the vocabulary of {limits.vocab_size}", param="prompt"
            )
        for name in ("logit_bias", "stop_token_ids"):
            unknown = [token for token in getattr(request.params, name) if not 0 <= token < limits.vocab_size]
            if unknown:
                raise InvalidRequestError(
                    f"{name} names token id {unknown[0]}; the vocabulary has {limits.vocab_size}", param=name
                )
        if len(prompt) >= limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; the model's context is {limits.max_model_len} tokens,"
                " with room for at least one more; shorten the prompt",
                param="prompt",
            )
        pool = self._scheduler.pool
        longest = min(len(prompt) + (0 if request.prefill_only else request.params.max_tokens), limits.max_model_len)
        if -(-longest // pool.page_size) > pool.num_pages:
            raise ContextLengthError(
                f"prompt and max_tokens make up to {longest} tokens; this worker's KV cache holds"
                f" {pool.num_pages * pool.page_size}; shorten the prompt or lower max_tokens",
                param="max_tokens",
            )

    def open(self, request: EngineRequest) -> None:
        """Take in a request and queue its first sequence."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        state = self._requests[request.request_id] = _Request(request, unfinished=request.params.n)
        sequence = self._new_sequence(state)
        for token_id in request.resumed_ids:
            sequence.append(token_id)
        text = state.texts[0]
        if text is not None and request.resumed_ids:
            text.push(request.resumed_ids, (), (None, ""))  # said already; what is still held back comes later
        self._scheduler.add(sequence)

    def drop(self, request_id: str) -> bool:
        """Forget a request and release its pages; False where it is not live."""
        state = self._requests.pop(request_id, None)
        for sequence in state.sequences if state else ():
            self._finish(sequence)
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
                self._lease(sequence)
            self._metrics.prefix_queried_tokens.inc(len(sequence.prompt_ids))
            self._metrics.prefix_hit_tokens.inc(sequence.computed)
            events.append((sequence.request_id, Admitted(sequence.computed, awaits_kv)))
        return events

    def claim_lease(self, request_id: str) -> PageLease | None:
        """Take over the hold on an admitted request's pages; None where the request was dropped before."""
        lease = self._unclaimed.pop(request_id, None)
        self._claimed += lease is not None
        return lease

    def release_lease(self, lease: PageLease) -> None:
        """A transfer no longer reads or writes the pages."""
        self._scheduler.pool.release(lease.pages)
        self._claimed -= 1

    def close(self, request_id: str) -> None:
        """Nobody listens to a request any more: drop it, and its lease if nobody claimed that."""
        self.drop(request_id)
        lease = self._unclaimed.pop(request_id, None)
        if lease is not None:
            self._scheduler.pool.release(lease.pages)

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
        for sequence in state.sequences:
            if sequence.finish_reason is not None:
                self._finish(sequence)
        return self.emit_drawn(request_id)

    def receive_kv(self, request_id: str) -> None:
        """A transfer has filled the prompt's pages."""
        sequence = self._receiving(request_id)
        if sequence is not None:
            self._scheduler.received(sequence)
            self._queue_deferred(request_id)

    def compute_here(self, request_id: str) -> None:
        """A transfer failed for good."""
        sequence = self._receiving(request_id)
        if sequence is not None:
            self._scheduler.compute_here(sequence)
            self._queue_deferred(request_id)

    # -- steps ---------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[Step, Events]:
        """The next step, and the requests whose prefill it starts."""
        events: Events = []
        step = Step(self._scheduler.schedule())
        self._computing = {item.sequence for item in step.work}
        for item in step.work:
            sequence, end = item.sequence, item.sequence.computed + item.count
            state = self._requests[sequence.request_id]
            if not state.prefill_started:
                state.prefill_started = True
                events.append((sequence.request_id, PrefillStarted()))
            last = end == len(sequence.token_ids)
            tokens = sequence.token_ids[sequence.computed : end]
            if last:
                self._add_rows(step, state, sequence)
            step.slices.append(SequenceSlice(tokens, sequence.computed, sequence.page_table, last))
            if sequence.prefill_only:
                self._add_written(step, sequence, end)
        return step, events

    def settle(self, step: Step, tokens: Sequence[SampledToken]) -> Events:
        """Book a computed step: KV, new tokens, ends; finish what was dropped meanwhile."""
        self._scheduler.computed(step.work)
        self.abandon()
        drawn: dict[Seq, list[SampledToken]] = {}
        for sequence, token in zip(step.drawn_for, tokens, strict=True):
            drawn.setdefault(sequence, []).append(token)
        events: Events = []
        for sequence, new in drawn.items():
            if sequence.status is not Status.RUNNING:
                continue
            if sequence.prefill_only:
                self.drop(sequence.request_id)
                events.append((sequence.request_id, Prefilled(tuple(new))))
            elif sequence.output_ids:
                self._append(sequence, new[0])
            else:
                state = self._requests[sequence.request_id]
                self._append_first(state, new)
                state.deferred = [s for s in state.sequences[1:] if s.finish_reason is None]
                self._queue_deferred(sequence.request_id)
            for sibling in () if sequence.prefill_only else self._requests[sequence.request_id].sequences:
                if sibling.finish_reason is not None:
                    self._finish(sibling)
        return events

    def abandon(self) -> None:
        """The step is over, well or not: finish what was dropped while it computed."""
        self._computing = set()
        for sequence in self._doomed:
            self._scheduler.finish(sequence)
        self._doomed = set()

    def emit_drawn(self, request_id: str | None = None) -> Events:
        """Output of all tokens booked since the last call, or of one request's."""
        now = [(s, t) for s, t in self._drawn if request_id in (None, s.request_id)]
        self._drawn = [] if request_id is None else [(s, t) for s, t in self._drawn if s.request_id != request_id]
        return [event for sequence, token in now for event in self._emit(sequence, token)]

    # -- details -------------------------------------------------------------------------------------------------

    def _new_sequence(self, state: _Request) -> Seq:
        spec, index = state.spec, len(state.sequences)
        self._arrivals += 1
        sequence = Seq(
            spec.request_id, index, spec.params, list(spec.prompt_ids), self._arrivals, spec.remote, spec.prefill_only
        )
        state.sequences.append(sequence)
        text = None if self._tokenizer is None or spec.prefill_only else SequenceText(self._tokenizer, sequence)
        state.texts.append(text)
        return sequence

    def _lease(self, sequence: Seq) -> None:
        pool, pages = self._scheduler.pool, tuple(sequence.page_table)
        pool.acquire(pages)
        self._unclaimed[sequence.request_id] = PageLease(pages, tuple(pool.generation(page) for page in pages))

    def _receiving(self, request_id: str) -> Seq | None:
        state = self._requests.get(request_id)
        return next((s for s in state.sequences if s.status is Status.RECEIVING), None) if state else None

    def _queue_deferred(self, request_id: str) -> None:
        state = self._requests[request_id]
        for sequence in state.deferred:
            self._scheduler.add(sequence)
        state.deferred = []

    def _add_written(self, step: Step, sequence: Seq, end: int) -> None:
        page_size = self._scheduler.pool.page_size
        complete = -(-end // page_size) if end == len(sequence.prompt_ids) else end // page_size
        first = sequence.computed // page_size
        if first < complete:
            step.written.append(WrittenPages(sequence.request_id, first, complete))

    def _add_rows(self, step: Step, state: _Request, sequence: Seq) -> None:
        logit_row = sum(1 for piece in step.slices if piece.wants_logits)
        for index in (sequence.index,) if sequence.output_ids else range(state.spec.params.n):
            step.drawn_for.append(sequence)
            step.logit_rows.append(logit_row)
            step.rows.append(
                SampleRow(
                    params=sequence.params,
                    index=index,
                    position=len(sequence.token_ids),
                    prompt_ids=sequence.prompt_ids,
                    output_ids=sequence.output_ids,
                    banned=banned_tokens(sequence, self._limits.eos_token_ids),
                )
            )

    def _append_first(self, state: _Request, tokens: Sequence[SampledToken]) -> None:
        """Give each of the n sequences its first token, making those that do not exist yet."""
        for index, token in enumerate(tokens):
            sequence = state.sequences[index] if index < len(state.sequences) else self._new_sequence(state)
            self._append(sequence, token)

    def _append(self, sequence: Seq, token: SampledToken) -> None:
        sequence.append(token.token_id)
        sequence.finish_reason, _ = ending_of(sequence, self._limits.eos_token_ids, self._limits.max_model_len)
        self._drawn.append((sequence, token))

    def _emit(self, sequence: Seq, token: SampledToken) -> Events:
        """Output of one token, with its text; a stop string that it completes ends the sequence."""
        state = self._requests.get(sequence.request_id)
        if state is None:
            return []
        ending: tuple[FinishReason | None, str] = (None, "")
        if sequence.finish_reason is not None:
            ending = ending_of(sequence, self._limits.eos_token_ids, self._limits.max_model_len)
        logprobs = () if token.logprobs is None else (token.logprobs,)
        text = state.texts[sequence.index]
        if text is None:
            output = Output(sequence.index, (token.token_id,), "", logprobs, *ending)
        else:
            output = text.push((token.token_id,), logprobs, ending)
        state.completion_tokens += 1
        events: Events = [(sequence.request_id, output)]
        if output.finish_reason is not None:
            sequence.finish_reason = output.finish_reason
            self._finish(sequence)
            state.deferred = [s for s in state.deferred if s is not sequence]
            state.unfinished -= 1
        if not state.unfinished:
            del self._requests[sequence.request_id]
            events.append((sequence.request_id, Finished(state.completion_tokens)))
        return events

    def _finish(self, sequence: Seq) -> None:
        if sequence in self._computing:
            self._doomed.add(sequence)
            sequence.status = Status.FINISHED
        elif sequence.status is not Status.FINISHED:
            self._scheduler.finish(sequence)
