"""Channel arguments that clients and servers must agree on."""

KEEPALIVE_TIME_MS = 5_000  # silence after which a ping asks whether the peer still lives
KEEPALIVE_TIMEOUT_MS = 5_000  # silence after that ping after which the peer is dead
MAX_RECONNECT_BACKOFF_MS = 2_000  # a restarted worker is found again within about this time

STREAM_WINDOW_BYTES = 8 << 20  # HTTP/2 lets this much of one call be on its way; the default probes, and finds less
HTTP2_FRAME_BYTES = 1 << 20  # 16 KiB by default: 4 MiB KV frames need fewer and larger ones
# With both, and the probe off, 4 MiB frames crossed loopback at 1.1 to 2.0 GB/s instead of 0.6 to 0.8
# (three runs of six, two cores that others used too; benchmarks/transport.py).

DEFAULT_MAX_MESSAGE_BYTES = 40 << 20
"""Largest message; above the default max_frame_bytes with room for what surrounds a frame."""

MESSAGE_OVERHEAD_BYTES = 64 << 10
"""Room that a message needs around the frame it carries."""


def common_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Message bounds, keepalive (a dead peer is noticed in ten seconds) and flow control, the same on both ends."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else the default, a minute, overrules the line above
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
        ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
    ]
