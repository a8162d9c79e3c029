"""A decode worker's spans of one generation, for a collector."""

from typing import TYPE_CHECKING

from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.tracing import Attribute, Hop, Tracing
from kvrail.wire.v1 import decode_pb2

if TYPE_CHECKING:
    from kvrail.services.decode.progress import Progress

PROCESS = "decode worker"
PARTS = {
    "queue": "admit",
    "handshake": "handshake",
    "kv_wait": "wait for KV",
    "draft": "draft",
    "verify": "verify",
    "decode": "decode",
}
"""The parts of a request's time that pass here, and their names in a trace."""
LOCAL_PARTS = PARTS | {"prefill_queue": "queue", "prefill": "prefill"}


def begin(tracing: Tracing, request: decode_pb2.GenerateRequest, timeline: Timeline) -> Hop | None:
    """Begin one generation's part of a request's trace, unless it is not sampled."""
    attributes: dict[str, Attribute] = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": request.sampling.max_tokens,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "kvrail.request_id": request.request_id,
        "kvrail.resumed_tokens": sum(len(each.token_ids) for each in request.resumed),
    }
    return tracing.hop("decode", request.trace_context, timeline, attributes)


def end(hop: Hop, progress: "Progress", error: str) -> None:
    """Export the generation's outcome; error: the class of what ended it, empty where nothing did."""
    hop.parts(PARTS if progress.prefill_worker else LOCAL_PARTS)
    if progress.spans is not None:
        hop.transfer(PROCESS, progress.spans.all())
    received = progress.received
    attributes: dict[str, Attribute] = {
        "gen_ai.usage.output_tokens": progress.completion_tokens,
        "kvrail.cached_tokens": progress.cached_tokens,
        "kvrail.drafts_proposed": progress.drafts.proposed,
        "kvrail.drafts_accepted": progress.drafts.accepted,
    }
    if progress.prefill_worker:
        attributes |= {
            "kvrail.prefill_worker": progress.prefill_worker,
            "kvrail.codec": received.codec,
            "kvrail.transport": received.transport,
            "kvrail.kv_bytes": received.payload_bytes,
            "kvrail.kv_raw_bytes": received.raw_bytes,
        }
    hop.end(attributes, error, progress.timeline.get(Moment.FINISHED))
