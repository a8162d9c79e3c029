"""The usage object: OpenAI's counts and our own extension."""

from typing import Any

from kvrail.services.router.generate.generation import Generation
from kvrail.services.router.plan.translate import Plan
from kvrail.telemetry.moments import Timeline
from kvrail.values.kv_cache import is_exact


def usage_so_far(plan: Plan, completion_tokens: int) -> dict[str, Any]:
    """Counts while tokens still come."""
    prompt_tokens = plan.prompt_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def final_usage(generation: Generation, completion_tokens: int) -> dict[str, Any]:
    """Counts at the end, with where the KV came from, its bytes on the wire and before encoding, and the time it took.

    Over several prompts, counts and bytes are sums, names are joined by commas and the stages are those of the prompt
    that finished last. prefill_worker: null where decode workers prefilled themselves; reason: why they did. lossy:
    whether a codec was used that does not restore every bit. kv_cache: the forms of the decode workers' pages. exact:
    whether neither codec nor pages lost a bit. invariant: whether any worker with such pages would give these tokens
    these bits, whatever is computed beside them. codec_reason: why this codec, where the choice was left to the decode
    worker or another one was asked for that is not compiled yet. exposed_transfer_seconds: the longest time that exact
    KV came after its prompt had been computed.
    """
    summaries, timeline = generation.summaries, generation.adopt_marks()
    usage = usage_so_far(generation.plan, completion_tokens)
    usage["prompt_tokens_details"] = {"cached_tokens": sum(min(s.cached_tokens, s.prompt_tokens) for s in summaries)}
    prefill_workers = dict.fromkeys(s.prefill_worker for s in summaries if s.prefill_worker)
    codecs = dict.fromkeys(summary.codec for summary in summaries if summary.codec)
    usage["kvrail"] = {
        "prefill_worker": ",".join(prefill_workers) or None,
        "reason": next((summary.local_reason for summary in summaries if summary.local_reason), None),
        "codec": ",".join(codecs) or None,
        "transport": ",".join(dict.fromkeys(s.transport for s in summaries if s.transport)) or None,
        "codec_reason": next((summary.codec_reason for summary in summaries if summary.codec_reason), None),
        "lossy": generation.lossy,
        "kv_cache": ",".join(generation.forms),
        "exact": not generation.lossy and all(map(is_exact, generation.forms)),
        "invariant": generation.invariant,
        "kv_bytes": sum(summary.kv_bytes for summary in summaries),
        "kv_raw_bytes": sum(summary.kv_raw_bytes for summary in summaries),
        "exposed_transfer_seconds": round(max((summary.exposed_s for summary in summaries), default=0.0), 6),
        "drafts_proposed": sum(summary.drafts_proposed for summary in summaries),
        "drafts_accepted": sum(summary.drafts_accepted for summary in summaries),
        "stage_seconds": {name: round(seconds, 6) for name, seconds in timeline.parts().items()},
    }
    if generation.plan.traced:
        usage["kvrail"]["trace"] = _trace(generation, timeline)
    return usage


def _trace(generation: Generation, timeline: Timeline) -> dict[str, Any]:
    """The request's moments and the workers' spans, in seconds since the request arrived."""
    return {
        "moments": {moment.value: round(seconds, 6) for moment, seconds in timeline.marks()},
        "spans": [
            {
                "process": span.process,
                "track": span.track,
                "name": span.name,
                "begin": round(span.begin, 6),
                "seconds": round(span.seconds, 6),
                **span.sizes,
            }
            for span in generation.spans()
        ],
    }
