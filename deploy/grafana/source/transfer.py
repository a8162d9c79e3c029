"""The boards of what crosses: KV transfer and codecs, and drafts."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source.parts import Panel, bars, board, heat, lines, number
from deploy.grafana.source.queries import (
    TOKEN_RATE,
    WORKER_NAME,
    Query,
    increase,
    label_replaced,
    mean,
    named,
    quantile,
    quantiles,
    rate,
    share,
    split,
    total,
)

RECEIVED = 'direction="received"'
RAW, PAYLOAD = "kvrail_kv_raw_bytes_total", "kvrail_kv_payload_bytes_total"


def _totals() -> list[Panel]:
    kept_off = f"({increase(RAW, RECEIVED)} - {increase(PAYLOAD, RECEIVED)})"
    return [
        number(
            "Saved in the range",
            "KV bytes that compression kept off the wire, in the board's time range.",
            "decbytes",
            kept_off,
            width=6,
        ),
        number(
            "Compression",
            "KV bytes before encoding, over those on the wire.",
            "suffix:×",
            share(rate(RAW, RECEIVED), rate(PAYLOAD, RECEIVED)),
            width=6,
        ),
        number(
            "KV not hidden, p99",
            "From the end of a prompt's computation to its exact KV at the decode worker: what nothing hid.",
            "s",
            quantile(0.99, "kvrail_kv_exposed_transfer_seconds"),
            width=6,
        ),
        number(
            "Failed transfers/s",
            "Transfers that failed, at either end.",
            "ops",
            rate("kvrail_kv_transfers_total", 'outcome="failed"'),
            width=6,
            steps=((None, "green"), (0.001, "red")),
        ),
    ]


def _wire() -> list[Panel]:
    links = total("kvrail_kv_link_bytes_per_second", by="instance, prefill_worker")
    transfers = label_replaced(
        share(rate(PAYLOAD, RECEIVED, by="instance"), rate("kvrail_kv_transfer_seconds_sum", RECEIVED, by="instance")),
        "prefill_worker",
        "all transfers",
    )
    return [
        lines(
            "KV received",
            "Bytes of KV before encoding and on the wire.",
            "Bps",
            Query(rate(RAW, RECEIVED), "before encoding"),
            Query(rate(PAYLOAD, RECEIVED), "on the wire"),
            width=12,
        ),
        lines(
            "Compression by codec",
            "KV bytes before encoding, over those on the wire.",
            "suffix:×",
            Query(share(rate(RAW, RECEIVED, by="codec"), rate(PAYLOAD, RECEIVED, by="codec")), "{{codec}}"),
            width=12,
        ),
        lines(
            "On the wire by codec",
            "KV bytes received, as they crossed.",
            "Bps",
            split(rate, PAYLOAD, RECEIVED, by="codec"),
            stacked=True,
            width=12,
        ),
        lines(
            "Links",
            "What the link from a prefill worker to a decode worker carries, by its last large transfers, and the mean"
            " rate of all transfers to that worker, which short ones lower.",
            "Bps",
            Query(named(f"{links} or {transfers}"), "{{prefill_worker}} to {{worker}}"),
            width=12,
        ),
    ]


def _transfers() -> list[Panel]:
    return [
        lines(
            "Transfers by how they ended",
            "As decode workers see them: committed, aborted on purpose, or failed.",
            "ops",
            split(rate, "kvrail_kv_transfers_total", RECEIVED, by="outcome"),
        ),
        lines(
            "Time of a transfer",
            "From a transfer's first frame to its last, at the decode worker.",
            "s",
            *quantiles("kvrail_kv_transfer_seconds", RECEIVED),
        ),
        lines(
            "KV not hidden",
            "From the end of a prompt's computation to its exact KV at the decode worker.",
            "s",
            *quantiles("kvrail_kv_exposed_transfer_seconds"),
        ),
        lines(
            "Fallbacks",
            "Prefills that an alternate worker or the decode worker itself computed, and prefills that none did.",
            "ops",
            split(rate, "kvrail_prefill_fallbacks_total", by="reason"),
        ),
        lines("Frames", "KV frames sent and received.", "ops", split(rate, "kvrail_kv_frames_total", by="direction")),
        lines(
            "Bytes that wait",
            "Later stages held at prefill workers until first stages have left, and earlier stages"
            " kept at decode workers until the last has come.",
            "decbytes",
            Query(total("kvrail_kv_held_bytes"), "held"),
            Query(total("kvrail_kv_kept_bytes"), "kept"),
        ),
    ]


def _codecs() -> list[Panel]:
    escapes = share(
        rate("kvrail_kv_escaped_values_total", by="codec"), rate("kvrail_kv_encoded_values_total", by="codec")
    )
    return [
        lines(
            "Encoding a frame, p99",
            "Until its bytes are on the host; on a GPU, waits for it included.",
            "s",
            Query(quantile(0.99, "kvrail_kv_encode_seconds", by="codec"), "{{codec}}"),
        ),
        lines(
            "Decoding a frame, p99",
            "Time that it took a thread; on a GPU, kernels go on behind it.",
            "s",
            Query(quantile(0.99, "kvrail_kv_decode_seconds", by="codec"), "{{codec}}"),
        ),
        lines(
            "Values that escape",
            "Share of keys' and values' elements that no code covered. Above 1 %, calibrate.",
            "percentunit",
            Query(escapes, "{{codec}}"),
        ),
        lines(
            "Tensors sent as they were",
            "Keys or values of a frame that no code would have made smaller.",
            "ops",
            split(rate, "kvrail_kv_raw_tensors_total", by="codec"),
        ),
        bars(
            "Choices of a codec",
            "Transfers whose codec was left to the decode worker, in the range, by what it took and why.",
            "count:transfers",
            split(increase, "kvrail_kv_codec_choices_total", by="codec, reason"),
            width=12,
        ),
        number(
            "Lossy requests",
            "Requests in the range whose KV came through a codec that does not restore every bit.",
            "count:requests",
            increase("kvrail_lossy_requests_total"),
        ),
    ]


def transfer() -> Dashboard:
    """KV on the wire, and what codecs do."""
    sections = {"On the wire": [*_totals(), *_wire()], "Transfers": _transfers(), "Codecs": _codecs()}
    description = "What crosses between workers, how fast, and what codecs make of it."
    return board("kvrail-transfer", "KV transfer and codecs", description, sections)


def _verified() -> list[Panel]:
    proposed, accepted = "kvrail_engine_drafts_proposed_total", "kvrail_engine_drafts_accepted_total"
    right = share(rate(accepted, by="instance"), rate(proposed, by="instance"))
    return [
        number(
            "Accepted",
            "Share of the drafts that verification on exact KV repeated.",
            "percentunit",
            share(rate(accepted), rate(proposed)),
            width=8,
            steps=((None, "red"), (0.3, "orange"), (0.6, "green")),
        ),
        number("Drafts/s", "Tokens drafted on coarse KV.", TOKEN_RATE, rate(proposed), width=8),
        number(
            "Wait hidden, mean",
            "Of the time from a request's first token to its exact KV, the share during which drafts were made.",
            "percentunit",
            mean("kvrail_kv_wait_hidden_share"),
            width=8,
        ),
        lines(
            "Drafts",
            "Proposed, and accepted by their verification.",
            TOKEN_RATE,
            Query(rate(proposed), "proposed"),
            Query(rate(accepted), "accepted"),
            width=12,
        ),
        lines(
            "Accepted by worker",
            "Share of the drafts that were right.",
            "percentunit",
            Query(named(right), WORKER_NAME),
            top=1,
            width=12,
        ),
        heat(
            "Accepted in one verification",
            "How far drafts stay right: drafts accepted in one verification.",
            "count:drafts",
            split(rate, "kvrail_engine_accepted_drafts_bucket", by="le"),
            width=12,
        ),
        lines(
            "Accepted in one verification, mean",
            "Drafts that a verification accepts.",
            "count:drafts",
            Query(named(mean("kvrail_engine_accepted_drafts", by="instance")), WORKER_NAME),
            width=12,
        ),
    ]


def _times_of_drafts() -> list[Panel]:
    eighth = quantile(0.5, "kvrail_time_to_token_seconds", 'k="8"', by="kind")
    return [
        lines(
            "Time to the 8th token",
            "Median, verified, and shown as a draft to clients that ask for drafts.",
            "s",
            Query(eighth, "{{kind}}"),
            width=12,
        ),
        lines(
            "Drafting and verifying",
            "Mean time of these two parts of a request.",
            "s",
            split(mean, "kvrail_request_stage_seconds", 'stage=~"draft|verify"', by="stage"),
            width=12,
        ),
    ]


def drafts() -> Dashboard:
    """Drafts on coarse KV, and what became of them."""
    description = "Tokens drafted on the first stage of the KV, and what verification on the whole made of them."
    return board("kvrail-drafts", "drafts", description, {"Drafts": [*_verified(), *_times_of_drafts()]})
