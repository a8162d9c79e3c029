"""Digests of payloads: 64 bits that tell whether what came is what left.

XXH3 is XXH3-64, for bytes in host memory. LANES is for payloads on a device, where thousands of lanes read a payload at
the memory's rate and in no order; here it is in numpy, for the host. All arithmetic is modulo 2^64:

    w_0 to w_(m-1)   the payload as 64-bit words, little-endian, the last filled up with zeros
    mix(x)           x *= 0xff51afd7ed558ccd; x ^= x >> 32; x *= 0xc4ceb9fe1a85ec53; x ^= x >> 32
    digest           mix(length in bytes + sum over i of mix(w_i ^ (i + 1) * 0x9e3779b97f4a7c15))

`mix` is one to one, so a change within one word always changes the digest, a single flipped bit among them. A word's
place is part of what is mixed, so swapped words or pages change it, and so do zeros added at the end, by the length;
what changes several words goes unseen about once in 2^64 times. A guard against damage, not against forgery.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvrail.codec.base import Payload

_MASK = (1 << 64) - 1
FIRST, SECOND, PLACE = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9E3779B97F4A7C15
"""The multipliers above, in the order of their first use in `mix`, then that of places."""
_PIECE_WORDS = 1 << 16
"""Words that the host mixes at once, so that what is in between stays in its cache."""


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


def lanes_of(payload: memoryview) -> int:
    """LANES of bytes in host memory, in numpy: what the kernel must equal, and what a host has for it."""
    source = np.frombuffer(payload, dtype=np.uint8)
    total, whole = 0, source.size // 8
    for first in range(0, whole, _PIECE_WORDS):
        last = min(first + _PIECE_WORDS, whole)
        total += _sum_of(source[8 * first : 8 * last].view("<u8"), first)
    if source.size % 8:
        left = np.zeros(8, dtype=np.uint8)
        left[: source.size % 8] = source[8 * whole :]
        total += _sum_of(left.view("<u8"), whole)
    return finished(total, source.size)


def finished(total: int, payload_bytes: int) -> int:
    """The digest, given the sum over all words, modulo 2^64 or not."""
    x = (payload_bytes + total) * FIRST & _MASK
    x = (x ^ x >> 32) * SECOND & _MASK
    return x ^ x >> 32


def _sum_of(words: npt.NDArray[np.uint64], first: int) -> int:
    """Sum of the mixed words; the first one has place `first`."""
    x = np.arange(first + 1, first + 1 + words.size, dtype=np.uint64)
    x *= np.uint64(PLACE)
    x ^= words
    for multiplier in (FIRST, SECOND):
        x *= np.uint64(multiplier)
        x ^= x >> np.uint64(32)
    return int(x.sum(dtype=np.uint64))
