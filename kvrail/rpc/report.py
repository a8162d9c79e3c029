"""What a worker's status carries of its metrics, for the router's status page."""

from prometheus_client import CollectorRegistry

from kvrail.telemetry.readings import Readings
from kvrail.wire.v1 import common_pb2

RAW_BYTES, PAYLOAD_BYTES = "kvrail_kv_raw_bytes_total", "kvrail_kv_payload_bytes_total"
PROPOSED, ACCEPTED = "kvrail_engine_drafts_proposed_total", "kvrail_engine_drafts_accepted_total"
QUERIED = "kvrail_engine_prefix_cache_queried_tokens_total"
FOUND = "kvrail_engine_prefix_cache_hit_tokens_total"
LINKS = "kvrail_kv_link_bytes_per_second"
SERIES = (RAW_BYTES, PAYLOAD_BYTES, PROPOSED, ACCEPTED, QUERIED, FOUND, LINKS)


def report_of(registry: CollectorRegistry) -> common_pb2.WorkerReport:
    """Bytes received by codec, drafts, prefix cache and links, as `registry` has them now.

    Codecs that moved nothing are left out.
    """
    now = Readings(registry, SERIES)
    raw = now.by(RAW_BYTES, "codec", direction="received")
    payload = now.by(PAYLOAD_BYTES, "codec", direction="received")
    return common_pb2.WorkerReport(
        received=[
            common_pb2.CodecBytes(codec=codec, raw_bytes=int(raw.get(codec, 0)), payload_bytes=int(count))
            for codec, count in payload.items()
            if count
        ],
        drafts_proposed=int(now.total(PROPOSED)),
        drafts_accepted=int(now.total(ACCEPTED)),
        prefix_queried_tokens=int(now.total(QUERIED)),
        prefix_hit_tokens=int(now.total(FOUND)),
        link_bytes_per_s=now.by(LINKS, "prefill_worker"),
    )
