"""Runs a decode worker."""

from codec.registry import names
from kvrail.config import DecodeSettings
from kvrail.errors import ConfigError
from kvrail.worker import PROTOCOL_OVERHEAD_BYTES, build_worker, run_worker, serve
from services.decode.prefill_workers import GrpcPrefillWorkers
from services.decode.servicer import DecodeServicer


def run(settings: DecodeSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code."""
    return run_worker(settings, "decode", _main(settings))


async def _main(settings: DecodeSettings) -> None:
    if settings.codec not in names():
        raise ConfigError(f"codec is {settings.codec!r}; choose one of {', '.join(names())}")
    worker = build_worker(settings, codecs=names(), local_prefill_tokens=settings.local_prefill_tokens, detokenize=True)
    prefill_workers = GrpcPrefillWorkers(settings.max_frame_bytes + PROTOCOL_OVERHEAD_BYTES)
    servicer = DecodeServicer(worker, settings, prefill_workers)
    try:
        await serve(worker, settings.port, lambda rpc: rpc.add_decode(servicer))
    finally:
        await prefill_workers.close()
