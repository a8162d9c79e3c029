"""What a worker's status carries of its metrics, for the router."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from kvrail.telemetry.readings import Readings
from kvrail.wire.v1 import common_pb2

RAW_BYTES, PAYLOAD_BYTES = "kvrail_kv_raw_bytes_total", "kvrail_kv_payload_bytes_total"
PROPOSED, ACCEPTED = "kvrail_engine_drafts_proposed_total", "kvrail_engine_drafts_accepted_total"
QUERIED = "kvrail_engine_prefix_cache_queried_tokens_total"
FOUND = "kvrail_engine_prefix_cache_hit_tokens_total"
PROMPTS = "kvrail_engine_prompt_tokens_total"
LINKS, COMPILING = "kvrail_kv_link_bytes_per_second", "kvrail_codec_compiling"
SERIES = (RAW_BYTES, PAYLOAD_BYTES, PROPOSED, ACCEPTED, QUERIED, FOUND, PROMPTS, LINKS, COMPILING)


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker runs on: its name, and bytes in use and in all, of the device's memory or of the host's."""

    name: str = ""
    used: int = 0
    total: int = 0


def report_of(registry: CollectorRegistry, device: Device) -> common_pb2.WorkerReport:
    """What `registry` has of received bytes by codec, drafts, prefix cache, prompts, links and codecs; the device.

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
        compiling=[codec for codec, under_way in now.by(COMPILING, "codec").items() if under_way],
        device=device.name,
        memory_used=device.used,
        memory_total=device.total,
        prompt_tokens=int(now.total(PROMPTS)),
    )
