"""The state of one generation: its moments, its output so far, and the reply for each event."""

from dataclasses import dataclass, field

from kvrail.engine.request.events import (
    Admitted,
    Drafted,
    Event,
    Finished,
    Output,
    PrefillStarted,
    PromptScored,
    Verified,
)
from kvrail.engine.request.requests import EngineRequest
from kvrail.services.decode.drafts import DraftLog
from kvrail.services.decode.invariance import InvarianceTracker
from kvrail.services.decode.trace import PROCESS
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.spans import SpanLog
from kvrail.telemetry.tracing import Hop
from kvrail.wire.convert import (
    finish_reason_to_proto,
    logprobs_to_proto,
    marks_to_proto,
    prompt_logprobs_to_proto,
    spans_to_proto,
)
from kvrail.wire.v1 import decode_pb2


@dataclass(slots=True)
class Received:
    """What a transfer has brought so far: for usage and metrics."""

    codec: str = ""
    lossy: bool = False
    transport: str = ""
    payload_bytes: int = 0
    raw_bytes: int = 0
    numerics: str = ""


@dataclass(slots=True)
class Progress:
    """Follows one request's events in order.

    provisional: whether the caller gets drafts. traced: whether it gets spans. trace: this worker's part of a trace.
    """

    request: EngineRequest
    invariance: InvarianceTracker
    provisional: bool
    traced: bool = False
    trace: Hop | None = None
    timeline: Timeline = field(default_factory=Timeline)
    cached_tokens: int = 0
    prefill_worker: str = ""  # asked to compute the prompt; empty where none was, or where all have failed
    committed: bool = False  # that worker's KV is in the pages
    asked_codec: str = ""
    substituted: str = ""  # why another codec crosses, where one does
    codec_reason: str = ""  # why this one was asked for, where the choice was left to this worker
    received: Received = field(default_factory=Received)
    drafts: DraftLog = field(init=False)
    spans: SpanLog | None = field(init=False, default=None)
    _last_draft: float = 0.0  # seconds since the request came
    _last_output: float | None = None
    completion_tokens: int = 0

    def __post_init__(self) -> None:
        if self.traced or self.trace is not None:
            self.spans = SpanLog(PROCESS, self.timeline, requested=self.traced)
        self.drafts = DraftLog([len(each.token_ids) for each in self.request.resumed] or [0] * self.request.params.n)

    def take(self, event: Event) -> decode_pb2.GenerateReply | None:
        """Take note of an event; returns the reply to the caller, if any."""
        match event:
            case Output():  # by far the most common
                self._mark_first_token()
                self.drafts.output(event)
                if self.spans is not None and self.traced:
                    self._trace_output(event, self.spans)
                reply = _output_reply(event)
                reply.lossy = self._lossy()
                return reply
            case Admitted():
                self.timeline.mark(Moment.ADMITTED)
                self.cached_tokens = event.cached_tokens
            case PrefillStarted():
                self.timeline.mark(Moment.PREFILL_STARTED)
            case Drafted() | Verified():
                reply = self._take_drafts(event)
                return reply if self.provisional else None
            case PromptScored():
                return decode_pb2.GenerateReply(prompt_logprobs=prompt_logprobs_to_proto(event.logprobs))
            case Finished():
                self.timeline.mark(Moment.FINISHED)
                self.completion_tokens = event.completion_tokens
                return self._last_reply(event)
        return None

    def hidden_share(self) -> float | None:
        """The share of the wait for the KV, from the first token on, during which drafts were made.

        None where there was no wait: the KV came with the first token, or was computed here.
        """
        first, coarse, complete = (
            self.timeline.get(moment) for moment in (Moment.FIRST_TOKEN, Moment.KV_COARSE, Moment.KV_COMPLETE)
        )
        if not self.prefill_worker or first is None or coarse is None or complete is None or complete <= first:
            return None
        return max(0.0, min(self._last_draft, complete) - max(first, coarse)) / (complete - first)

    def steps_after(self) -> tuple[float, int]:
        """Seconds and number of the decode steps after the KV was exact; each gave one token."""
        begin = self.timeline.get(Moment.VERIFIED) or self.timeline.get(Moment.KV_COMPLETE)
        if self.request.params.n > 1 or begin is None:
            return 0.0, 0
        verified = self.drafts.accepted + 1 if self.drafts.proposed else 0
        steps = self.completion_tokens - 1 - verified
        return self.timeline.elapsed() - begin, steps

    def exposed_s(self) -> float | None:
        """Seconds of the transfer that no computation hid: from the prompt's last layer to its exact KV here.

        None where the KV was computed here, or is not here yet.
        """
        begin, end = self.timeline.get(Moment.PREFILL_FINISHED), self.timeline.get(Moment.KV_COMPLETE)
        return max(0.0, end - begin) if self.prefill_worker and begin is not None and end is not None else None

    def fetched_s(self) -> float | None:
        """Seconds from the request's admission to the first token that a prefill worker drew; None where none did."""
        begin, end = self.timeline.get(Moment.ADMITTED), self.timeline.get(Moment.FIRST_TOKEN)
        return end - begin if self.prefill_worker and begin is not None and end is not None else None

    def _take_drafts(self, event: Drafted | Verified) -> decode_pb2.GenerateReply:
        if isinstance(event, Drafted):
            self._last_draft = self.timeline.elapsed()
            return self.drafts.drafted(event)
        if self.timeline.get(Moment.KV_COMPLETE) is not None:
            self.timeline.mark(Moment.VERIFIED)
        return self.drafts.verified(event)

    def _trace_output(self, event: Output, spans: SpanLog) -> None:
        """The time since the output before; the first one's is the prefill's."""
        now, last = self.timeline.elapsed(), self._last_output
        if last is not None:
            spans.add("tokens", "step", now - last, tokens=len(event.token_ids), sequence=event.index)
        self._last_output = now

    def _mark_first_token(self) -> None:
        timeline = self.timeline
        if timeline.get(Moment.FIRST_TOKEN) is None:
            timeline.mark(Moment.PREFILL_FINISHED)  # marked already where a prefill worker drew it
            timeline.mark(Moment.FIRST_TOKEN)
            if timeline.get(Moment.PREFILL_QUEUED) is None:
                timeline.mark(Moment.KV_COARSE)
                timeline.mark(Moment.KV_COMPLETE)

    def _lossy(self) -> bool:
        """Whether some of the prompt's KV is not what was computed, bit for bit."""
        return self.received.lossy or bool(self.request.cache_space and self.cached_tokens)

    def _local_reason(self) -> str:
        """Why no prefill worker computed the prompt; empty where one did."""
        if self.prefill_worker:
            return ""
        if self.request.resumed:
            return "another decode worker was lost, and this one continues its output"
        if self.request.params.prompt_logprobs is not None:
            return "log probabilities of the prompt need its logits"
        if not self.request.remote:
            return "no prefill worker was chosen"
        missing = len(self.request.prompt_ids) - self.cached_tokens
        if missing > self.request.local_tokens:
            return "no prefill worker could compute it"
        return f"{missing} tokens were not cached; up to {self.request.local_tokens} are computed here"

    def _last_reply(self, event: Finished) -> decode_pb2.GenerateReply:
        received, lossy = self.received, self._lossy()
        numerics = self.invariance.of(received.numerics if self.prefill_worker else None, self.cached_tokens)
        return decode_pb2.GenerateReply(
            summary=decode_pb2.GenerateSummary(
                prompt_tokens=len(self.request.prompt_ids),
                completion_tokens=event.completion_tokens,
                cached_tokens=self.cached_tokens,
                marks=marks_to_proto(self.timeline.marks()),
                prefill_worker=self.prefill_worker,
                codec=received.codec,
                lossy=lossy,
                numerics="" if lossy else numerics,
                kv_bytes=received.payload_bytes,
                kv_raw_bytes=received.raw_bytes,
                drafts_proposed=self.drafts.proposed,
                drafts_accepted=self.drafts.accepted,
                codec_reason=self.codec_reason if self.received.codec in ("", self.asked_codec) else self.substituted,
                transport=received.transport if self.prefill_worker else "",
                exposed_s=self.exposed_s() or 0.0,
                local_reason=self._local_reason(),
                spans=spans_to_proto(self.spans.all()) if self.spans is not None and self.traced else (),
            )
        )


def _output_reply(event: Output) -> decode_pb2.GenerateReply:
    reply = decode_pb2.GenerateReply(index=event.index, token_ids=event.token_ids, text=event.text)
    if event.logprobs:
        reply.logprobs.extend(map(logprobs_to_proto, event.logprobs))
    if event.finish_reason is not None:
        reply.finish_reason = finish_reason_to_proto(event.finish_reason)
        reply.stop_reason = event.stop_reason
    return reply
