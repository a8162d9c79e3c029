"""A decode worker's spans of one generation, for a collector."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


class DecodeTrace:
    """One generation's part of a request's trace."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop

    @classmethod
    def begin(
        cls, tracing: Tracing | None, request: decode_pb2.GenerateRequest, timeline: Timeline
    ) -> "DecodeTrace | None":
        """Begin one, unless this worker exports none or this request is not sampled."""
        if tracing is None:
            return None
        attributes: dict[str, Attribute] = {
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": request.sampling.max_tokens,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "kvrail.request_id": request.request_id,
            "kvrail.resumed_tokens": sum(len(each.token_ids) for each in request.resumed),
        }
        hop = tracing.hop("decode", request.trace_context, timeline, attributes)
        return cls(hop) if hop.recorded else None

    @property
    def context(self) -> Mapping[str, str]:
        """What the prefill worker is given."""
        return self._hop.context

    @contextmanager
    def following(self, progress: "Progress") -> Iterator[None]:
        """Inside, the generation runs; its outcome is exported at the end."""
        error = ""
        try:
            yield
        except (asyncio.CancelledError, Exception) as failure:
            error = type(failure).__name__
            raise
        finally:
            self._end(progress, error)

    def _end(self, progress: "Progress", error: str) -> None:
        self._hop.parts(PARTS if progress.prefill_worker else LOCAL_PARTS)
        if progress.spans is not None:
            self._hop.transfer(PROCESS, progress.spans.all())
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
        self._hop.end(attributes, error, progress.timeline.get(Moment.FINISHED))
