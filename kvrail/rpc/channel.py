"""Client channels."""

import grpc
import grpc.aio

from kvrail.rpc.options import MAX_MESSAGE_BYTES, MAX_RECONNECT_BACKOFF_MS, common_options


def open_channel(target: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """Open a channel to `target`, host:port; it connects on its first call and again after a loss.

    No call is retried behind the caller's back: who fails over is the caller's decision.
    """
    options = [
        *common_options(max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS // 8),
        ("grpc.min_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(target, options=options)
