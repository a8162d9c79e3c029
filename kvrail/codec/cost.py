"""What a codec takes of time and bytes on one device, measured."""

from dataclasses import dataclass
from time import perf_counter

import torch

from kvrail.codec.base import Codec, PagedBlock

RUNS = 3
"""Of which the shortest counts: what runs beside one can only make it longer."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec takes for each byte of uncompressed KV.

    encode_s, decode_s: seconds, over all stages. stages: payload bytes of each.
    """

    encode_s: float
    decode_s: float
    stages: tuple[float, ...]


def measure(codec: Codec, pages: PagedBlock, *, on_device: bool = False) -> CodecCost:
    """The cost of a codec whose kernels are compiled; on_device: of payloads that stay on the pages' device."""
    runs = [_run(codec, pages, on_device) for _ in range(RUNS)]
    return CodecCost(min(run.encode_s for run in runs), min(run.decode_s for run in runs), runs[0].stages)


def _run(codec: Codec, pages: PagedBlock, on_device: bool) -> CodecCost:
    """Encode and decode once, on a stream of its own as transfers do."""
    stream = torch.cuda.Stream(pages.device) if pages.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    if stream is not None:
        torch.cuda.synchronize(pages.device)
    begin = perf_counter()
    with torch.cuda.stream(stream):
        payloads = codec.encode(pages, on_device=on_device).stages()
        encoded = perf_counter()
        for stage in range(len(payloads)):
            codec.decode(stage, payloads[: stage + 1], pages)
    if stream is not None:
        stream.synchronize()
    raw_bytes = pages.spec.raw_bytes
    stages = tuple(payload.nbytes / raw_bytes for payload in payloads)
    return CodecCost((encoded - begin) / raw_bytes, (perf_counter() - encoded) / raw_bytes, stages)
