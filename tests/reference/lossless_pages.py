"""Closing and opening of one tile, slow and readable: what the kernels must do, bit for bit."""

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.lossless.form import (
    BASE_STEP,
    BASES_TRIED,
    CHUNK,
    CODES,
    GROUPS,
    LANES,
    RAW,
    SLOTS,
    SOME,
    SPECIAL,
    TOKENS,
    WARPS,
    Tile,
    base_places,
    places,
)

Bytes = npt.NDArray[np.uint8]


def close_tile(values: npt.NDArray[np.uint16], keys: bool, unit: int) -> tuple[Bytes, Bytes | None]:
    """The closed tile of `values`, bits of bfloat16 [64, dim]; and, if it is raw, what the spare unit `unit` holds."""
    dim = values.shape[1]
    high, low = (values >> 8).astype(np.uint8), (values & 0xFF).astype(np.uint8)
    bases = _bases(np.asarray(high & 0x7F, np.uint8))
    codes = (high & 0x7F).astype(np.int64) - bases
    escaped = (codes < 0) | (codes >= CODES)
    nibbles = np.where(escaped, 0, codes | high >> 7 << 3)
    order = places(dim, keys)
    words = _escapes(np.where(escaped, high ^ bases, 0).astype(np.uint8).reshape(-1)[order])
    spare = None
    if words is None:
        words, spare = np.tile(np.array([RAW, unit], np.uint32), GROUPS), high.reshape(-1)[order]
    tile = np.concatenate(
        [
            low.reshape(-1)[order],
            _packed(nibbles.reshape(-1)[order]),
            bases[base_places(dim, keys)],
            words.view(np.uint8),
        ]
    )
    assert len(tile) == Tile(dim).bytes
    return tile, spare


def open_tile(tile: Bytes, dim: int, keys: bool, spare: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """The values of a closed tile, [64, dim]. spare: all spare units, [units, 64 * dim]."""
    form, order = Tile(dim), places(dim, keys)
    low, words = tile[: form.nibbles], tile[form.escapes :].view(np.uint32)
    if words[0] & RAW:
        high = spare[words[1], : TOKENS * dim]
    else:
        bases = np.empty(dim, np.uint8)
        bases[base_places(dim, keys)] = tile[form.bases : form.escapes]
        nibbles = _unpacked(tile[form.nibbles : form.bases])
        high = np.asarray((nibbles & 7) + bases[order % dim] | nibbles >> 3 << 7, np.uint8)
        in_groups = _by_group(high)
        for group in range(GROUPS):
            for word in words[SLOTS * group : SLOTS * (group + 1)]:
                in_groups[group, word & (SOME - 1)] ^= np.uint8(word >> 24)
        high = _in_order(in_groups)
    out = np.empty(TOKENS * dim, np.uint16)
    out[order] = high.astype(np.uint16) << 8 | low
    return out.reshape(TOKENS, dim)


def _bases(upper: Bytes) -> Bytes:
    """A base for each channel. upper: seven bits of each exponent, [64, dim].

    The first base tried has the channel's largest exponent in its window, but for those of infinities, NaN and values
    next to them, which are escapes.
    """
    top = np.where(upper < SPECIAL, upper, 0).max(0).astype(np.int64)
    tried = np.maximum(top - (CODES - 1) - BASE_STEP * np.arange(BASES_TRIED)[:, None], 0)  # [tried, dim]
    codes = upper[None] - tried[:, None]
    escapes = ((codes < 0) | (codes >= CODES)).sum(1)
    return np.asarray(tried[escapes.argmin(0), np.arange(upper.shape[1])], np.uint8)


def _by_group(values: Bytes) -> Bytes:
    """Bytes in the order of storage as [groups, values of a group]."""
    halves = values.reshape(2, -1, WARPS, LANES * CHUNK)
    return np.ascontiguousarray(halves.transpose(0, 2, 1, 3)).reshape(GROUPS, -1)


def _in_order(groups: Bytes) -> Bytes:
    """The reverse of `_by_group`."""
    halves = groups.reshape(2, WARPS, -1, LANES * CHUNK)
    return np.ascontiguousarray(halves.transpose(0, 2, 1, 3)).reshape(-1)


def _escapes(changes: Bytes) -> npt.NDArray[np.uint32] | None:
    """Words of escapes; None where a group has too many. changes: what to XOR each high byte with."""
    words = np.zeros((GROUPS, SLOTS), np.uint32)
    for group, change in enumerate(_by_group(changes)):
        (found,) = change.nonzero()
        if len(found) > SLOTS:
            return None
        words[group, : len(found)] = change[found].astype(np.uint32) << 24 | found.astype(np.uint32)
    words[0, 0] |= SOME * words.any()
    return words.reshape(-1)


def _packed(nibbles: npt.NDArray[np.int64]) -> Bytes:
    """Nibbles, in the order of storage, as words of eight."""
    of_word = nibbles.reshape(-1, 2, WARPS, LANES, 2, 2, 4).transpose(0, 2, 3, 1, 4, 5, 6).reshape(-1, 2, 4)
    first, second = (_spread(of_word[:, half]) for half in (0, 1))
    return np.asarray(first | second >> np.uint32(4) | second << np.uint32(28), np.uint32).view(np.uint8)


def _spread(nibbles: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Four nibbles each as a word: each one's sign in bit 7 of its byte, its code in bits 0 to 2."""
    spread = (nibbles & 7 | nibbles >> 3 << 7).astype(np.uint8)
    return np.ascontiguousarray(spread).view(np.uint32)[:, 0]


def _unpacked(packed: Bytes) -> Bytes:
    """The reverse of `_packed`."""
    words = packed.view(np.uint32)
    both = np.stack([words, words << np.uint32(4) | words >> np.uint32(28)], 1) & np.uint32(0x87878787)
    spread = both.view(np.uint8).reshape(-1, WARPS, LANES, 2, 2, 2, 4).transpose(0, 3, 1, 2, 4, 5, 6).reshape(-1)
    return np.asarray(spread & 7 | spread >> 7 << 3, np.uint8)
