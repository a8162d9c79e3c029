"""Digests of payloads: 64 bits that tell whether what came is what left.

XXH3 is XXH3-64, for bytes in host memory. LANES is for payloads on a device, where thousands of lanes read a payload at
the memory's rate and in no order (lanes.py).
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import xxhash

from kvrail.codec.base import Payload
from kvrail.codec.core.lanes import finished, lanes_of


class DigestKind(IntEnum):
    """How a digest was made, by the number that travels."""

    XXH3 = 1
    LANES = 2


@dataclass(frozen=True, slots=True)
class Digest:
    """A payload's length in bytes and its digest."""

    kind: DigestKind
    value: int
    payload_bytes: int


def digest_of(payload: Payload, kind: DigestKind | None = None) -> Digest:
    """The digest of a contiguous payload; without `kind`, of the kind that is cheapest where it lies.

    On a CUDA device the payload must be complete; nothing of other streams is waited for.
    """
    device_side = isinstance(payload, torch.Tensor) and payload.is_cuda
    kind = kind or (DigestKind.LANES if device_side else DigestKind.XXH3)
    if kind is DigestKind.LANES and isinstance(payload, torch.Tensor) and device_side:
        from kvrail.codec.core.gpu_digest import sum_of_words  # needs triton

        return Digest(kind, finished(sum_of_words(payload), payload.nbytes), payload.nbytes)
    view = payload.cpu().numpy().data if isinstance(payload, torch.Tensor) else payload.cast("B")
    if kind is DigestKind.LANES:
        return Digest(kind, lanes_of(view), view.nbytes)
    return Digest(kind, xxhash.xxh3_64_intdigest(view), view.nbytes)
