"""A prefill worker's spans of one prefill, for a collector."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.spans import SpanLog
from kvrail.telemetry.tracing import Attribute, Hop, Tracing
from kvrail.wire.v1 import prefill_pb2

PROCESS = "prefill worker"
PARTS = {"prefill_queue": "queue", "prefill": "prefill"}


class PrefillTrace:
    """One prefill's part of a request's trace."""

    def __init__(self, hop: Hop, timeline: Timeline) -> None:
        self._hop, self._timeline = hop, timeline

    @classmethod
    def begin(
        cls, tracing: Tracing | None, model: str, request: prefill_pb2.PrefillRequest, timeline: Timeline
    ) -> "PrefillTrace | None":
        """Begin one, unless this worker exports none or this request is not sampled. model: the worker's name of it."""
        if tracing is None:
            return None
        attributes: dict[str, Attribute] = {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "kvrail.request_id": request.request_id,
            "kvrail.held_pages": request.handshake.held_pages,
        }
        hop = tracing.hop("prefill", request.trace_context, timeline, attributes)
        return cls(hop, timeline) if hop.recorded else None

    @contextmanager
    def following(self, spans: SpanLog | None) -> Iterator[None]:
        """Inside, the prefill runs; its outcome is exported at the end."""
        error = ""
        try:
            yield
        except (asyncio.CancelledError, Exception) as failure:
            error = type(failure).__name__
            raise
        finally:
            self._hop.parts(PARTS)
            found = [] if spans is None else spans.all()
            self._hop.transfer(PROCESS, found)
            # Behind the last frame and the first token pages are given back, which is no part of the request.
            finished = self._timeline.get(Moment.PREFILL_FINISHED) or 0.0
            last = max(finished, *(span.begin + span.seconds for span in found)) if found else None
            self._hop.end({}, error, None if error else last)
