"""Channel arguments that clients and servers must agree on."""

KEEPALIVE_TIME_MS = 5_000  # silence after which a ping asks whether the peer still lives
KEEPALIVE_TIMEOUT_MS = 5_000  # silence after that ping after which the peer is dead
CONNECT_TIMEOUT_MS = 2_000  # for one attempt
MAX_RECONNECT_BACKOFF_MS = 500  # a worker that has started is found within about this time

MAX_MESSAGE_BYTES = 8 << 20
"""Largest message: a prompt of a million tokens takes less. KV does not travel in messages."""


def common_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Message bounds, and keepalive (a dead peer is noticed in ten seconds), the same on both ends."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else the default, a minute, overrules the line above
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
