"""A prefill worker's spans of one prefill, for a collector."""

from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.spans import SpanLog
from kvrail.telemetry.tracing import Attribute, Hop, Tracing
from kvrail.wire.v1 import prefill_pb2

PROCESS = "prefill worker"
PARTS = {"prefill_queue": "queue", "prefill": "prefill"}


def begin(tracing: Tracing, model: str, request: prefill_pb2.PrefillRequest, timeline: Timeline) -> Hop | None:
    """Begin one prefill's part of a request's trace, unless it is not sampled. model: the worker's name of it."""
    attributes: dict[str, Attribute] = {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "kvrail.request_id": request.request_id,
        "kvrail.held_pages": request.handshake.held_pages,
    }
    return tracing.hop("prefill", request.trace_context, timeline, attributes)


def end(hop: Hop, spans: SpanLog | None, error: str) -> None:
    """Export the prefill's outcome; error: the class of what ended it, empty where nothing did."""
    hop.parts(PARTS)
    found = [] if spans is None else spans.all()
    hop.transfer(PROCESS, found)
    # Behind the last frame and the first token pages are given back, which is no part of the request.
    finished = hop.timeline.get(Moment.PREFILL_FINISHED) or 0.0
    last = max(finished, *(span.begin + span.seconds for span in found)) if found else None
    hop.end({}, error, None if error else last)
