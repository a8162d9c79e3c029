"""The boards of what crosses: KV transfer and codecs, and drafts."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source.parts import Panel, bars, board, heat, lines, number
from deploy.grafana.source.queries import Query, increase, mean, quantile, quantiles, rate, series, share, total

RECEIVED = 'direction="received"'
SENT = 'direction="sent"'


def _wire() -> list[Panel]:
    raw, payload = "kvrail_kv_raw_bytes_total", "kvrail_kv_payload_bytes_total"
    kept_off = f"({increase(raw, RECEIVED)} - {increase(payload, RECEIVED)})"
    return [
        number(
            "Saved in the range",
            "KV bytes that compression kept off the wire, in the board's time range.",
            "decbytes",
            Query(kept_off, ""),
            width=6,
        ),
        number(
            "Compression",
            "KV bytes before encoding, over those on the wire.",
            "none",
            Query(share(rate(raw, RECEIVED), rate(payload, RECEIVED)), ""),
            width=6,
        ),
        number(
            "KV not hidden, p99",
            "From the end of a prompt's computation to its exact KV at the decode worker: what nothing hid.",
            "s",
            Query(quantile(0.99, "kvrail_kv_exposed_transfer_seconds"), ""),
            width=6,
        ),
        number(
            "Failed transfers/s",
            "Transfers that failed, at either end.",
            "ops",
            Query(rate("kvrail_kv_transfers_total", 'outcome="failed"'), ""),
            width=6,
            steps=((None, "green"), (0.001, "red")),
        ),
        lines(
            "KV received",
            "Bytes of KV before encoding and on the wire.",
            "Bps",
            Query(rate(raw, RECEIVED), "before encoding"),
            Query(rate(payload, RECEIVED), "on the wire"),
        ),
        lines(
            "Compression by codec",
            "KV bytes before encoding, over those on the wire.",
            "none",
            Query(share(rate(raw, RECEIVED, by="codec"), rate(payload, RECEIVED, by="codec")), "{{codec}}"),
        ),
        lines(
            "On the wire by codec",
            "KV bytes received, as they crossed.",
            "Bps",
            Query(rate(payload, RECEIVED, by="codec"), "{{codec}}"),
            stacked=True,
        ),
        lines(
            "Links",
            "What the link from a prefill worker to a decode worker carries, by its last transfers.",
            "Bps",
            Query(series("kvrail_kv_link_bytes_per_second"), "{{prefill_worker}} to {{instance}}"),
        ),
    ]


def _transfers() -> list[Panel]:
    return [
        lines(
            "Transfers by how they ended",
            "As decode workers see them: committed, aborted on purpose, or failed.",
            "ops",
            Query(rate("kvrail_kv_transfers_total", RECEIVED, by="outcome"), "{{outcome}}"),
            width=8,
        ),
        lines(
            "Time of a transfer",
            "From a transfer's first frame to its last, at the decode worker.",
            "s",
            *quantiles("kvrail_kv_transfer_seconds", RECEIVED),
            width=8,
        ),
        lines(
            "KV not hidden",
            "From the end of a prompt's computation to its exact KV at the decode worker.",
            "s",
            *quantiles("kvrail_kv_exposed_transfer_seconds"),
            width=8,
        ),
        lines(
            "Fallbacks",
            "Prefills that an alternate worker or the decode worker itself computed, and prefills that none did.",
            "ops",
            Query(rate("kvrail_prefill_fallbacks_total", by="reason"), "{{reason}}"),
            width=8,
        ),
        lines(
            "Frames",
            "KV frames sent and received.",
            "ops",
            Query(rate("kvrail_kv_frames_total", by="direction"), "{{direction}}"),
            width=8,
        ),
        lines(
            "Bytes that wait",
            "Later stages held at prefill workers until first stages have left, and earlier stages"
            " kept at decode workers until the last has come.",
            "decbytes",
            Query(total("kvrail_kv_held_bytes"), "held"),
            Query(total("kvrail_kv_kept_bytes"), "kept"),
            width=8,
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
            width=8,
        ),
        lines(
            "Decoding a frame, p99",
            "Time that it took a thread; on a GPU, kernels go on behind it.",
            "s",
            Query(quantile(0.99, "kvrail_kv_decode_seconds", by="codec"), "{{codec}}"),
            width=8,
        ),
        lines(
            "Values that escape",
            "Share of keys' and values' elements that no code covered. Above 1 %, calibrate.",
            "percentunit",
            Query(escapes, "{{codec}}"),
            width=8,
        ),
        lines(
            "Tensors sent as they were",
            "Keys or values of a frame that no code would have made smaller.",
            "ops",
            Query(rate("kvrail_kv_raw_tensors_total", by="codec"), "{{codec}}"),
            width=8,
        ),
        bars(
            "Choices of a codec",
            "Transfers whose codec was left to the decode worker, in the range, by what it took and why.",
            "none",
            Query(increase("kvrail_kv_codec_choices_total", by="codec, reason"), "{{codec}}: {{reason}}"),
            width=8,
        ),
        number(
            "Lossy requests",
            "Requests in the range whose KV came through a codec that does not restore every bit.",
            "none",
            Query(increase("kvrail_lossy_requests_total"), ""),
            width=8,
        ),
    ]


def transfer() -> Dashboard:
    """KV on the wire, and what codecs do."""
    sections = {"On the wire": _wire(), "Transfers": _transfers(), "Codecs": _codecs()}
    description = "What crosses between workers, how fast, and what codecs make of it."
    return board("kvrail-transfer", "KV transfer and codecs", description, sections)


def drafts() -> Dashboard:
    """Drafts on coarse KV, and what became of them."""
    proposed, accepted = rate("kvrail_engine_drafts_proposed_total"), rate("kvrail_engine_drafts_accepted_total")
    one = 'k="8"'
    parts = "kvrail_request_stage_seconds"
    panels = [
        number(
            "Accepted",
            "Share of the drafts that verification on exact KV repeated.",
            "percentunit",
            Query(share(accepted, proposed), ""),
            width=8,
            steps=((None, "red"), (0.3, "orange"), (0.6, "green")),
        ),
        number("Drafts/s", "Tokens drafted on coarse KV.", "none", Query(proposed, ""), width=8),
        number(
            "Wait hidden, mean",
            "Of the time from a request's first token to its exact KV, the share during which drafts were made.",
            "percentunit",
            Query(mean("kvrail_kv_wait_hidden_share"), ""),
            width=8,
        ),
        lines(
            "Drafts",
            "Proposed, and accepted by their verification.",
            "none",
            Query(proposed, "proposed"),
            Query(accepted, "accepted"),
        ),
        lines(
            "Accepted by worker",
            "Share of the drafts that were right.",
            "percentunit",
            Query(
                share(
                    rate("kvrail_engine_drafts_accepted_total", by="instance"),
                    rate("kvrail_engine_drafts_proposed_total", by="instance"),
                ),
                "{{instance}}",
            ),
            top=1,
        ),
        heat(
            "Accepted in one verification",
            "How far drafts stay right: drafts accepted in one verification.",
            "none",
            Query(rate("kvrail_engine_accepted_drafts_bucket", by="le"), "{{le}}"),
        ),
        lines(
            "Accepted in one verification, mean",
            "Drafts that a verification accepts.",
            "none",
            Query(mean("kvrail_engine_accepted_drafts", by="instance"), "{{instance}}"),
        ),
        lines(
            "Time to the 8th token",
            "Median, verified, and shown as a draft to clients that ask for drafts.",
            "s",
            Query(quantile(0.5, "kvrail_time_to_token_seconds", one, by="kind"), "{{kind}}"),
        ),
        lines(
            "Drafting and verifying",
            "Mean time of these two parts of a request.",
            "s",
            Query(mean(parts, 'stage=~"draft|verify"', by="stage"), "{{stage}}"),
        ),
    ]
    description = "Tokens drafted on the first stage of the KV, and what verification on the whole made of them."
    return board("kvrail-drafts", "drafts", description, {"Drafts": panels})
