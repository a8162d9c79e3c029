"""The router's spans of one request: the whole request, and the router's own parts."""

from collections.abc import Mapping
from typing import Literal

from kvrail.services.router.generate.generation import Generation
from kvrail.services.router.schema import Request
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.tracing import Attribute, Hop, Tracing

Operation = Literal["chat", "text_completion"]
"""Words of OpenTelemetry's conventions for generative AI, from which the attributes' names are too."""
PARTS = {"turn": "queue", "respond": "respond"}


def begin(
    tracing: Tracing,
    operation: Operation,
    request: Request,
    model: str,
    headers: Mapping[str, str],
    request_id: str,
    timeline: Timeline,
) -> Hop | None:
    """Begin a request's trace; None if it is not sampled. headers: the client's."""
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvrail",
        "gen_ai.request.model": model,
        "gen_ai.request.stream": bool(request.stream),
        "gen_ai.request.choice.count": request.n or 1,
        "kvrail.request_id": request_id,
    }
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        if (value := getattr(request, name, None)) is not None:
            whole = isinstance(value, int) and value >= 1 << 63  # a number that a span has no room for
            attributes[f"gen_ai.request.{name}"] = str(value) if whole else value
    return tracing.hop(f"{operation} {model}", headers, timeline, attributes)


def end(hop: Hop, outcome: str, generation: Generation | None, completion_tokens: int) -> None:
    """The request has ended; generation: None if none began."""
    hop.parts(PARTS)
    attributes: dict[str, Attribute] = {"kvrail.outcome": outcome}
    if generation is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": generation.plan.prompt_tokens,
            "gen_ai.usage.output_tokens": completion_tokens,
            "gen_ai.response.model": generation.model,
            "kvrail.cached_tokens": sum(summary.cached_tokens for summary in generation.summaries),
        }
    ended_well = outcome in ("stop", "length")
    if ended_well:
        attributes["gen_ai.response.finish_reasons"] = (outcome,)
    hop.end(attributes, "" if ended_well else outcome, hop.timeline.get(Moment.RESPONDED))
