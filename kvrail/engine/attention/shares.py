"""How sequences with one new token are shared out among the programs of a kernel: a pure function of their lengths.

It changes no bit (see `attention.triton.order`), only when the last program ends.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]

SHARE_FIELDS = 3
"""Integers of a share: see StepMeta.shares."""
_LEAST = 256
"""Fewest tokens of a share: those of the shortest part."""
_EVEN = 1.25
"""Sequences are of about one length if the longest has at most this times the mean."""
_SHARING = 0.06
"""What a share costs beside its tokens, as part of the time of a whole sequence."""
_TRIED = 5
"""Numbers of shares that are tried at least."""
_FEW_ROWS = 4
_FEW, _MANY = 512, 1024
"""Programs that are launched for few rows, and for more, beyond one for each row and KV head."""


def room_for(rows: int, kv_heads: int) -> int:
    """The most shares of `rows` sequences."""
    return rows + -(-(_FEW if rows <= _FEW_ROWS else _MANY) // kv_heads) if rows else 0


def shares_of(lengths: Ints, kv_heads: int, programs: int) -> Ints:
    """Shares of sequences, the longest first: [room_for(rows, kv_heads), SHARE_FIELDS].

    lengths: [rows], in tokens; 0: there is none. programs: how many run at once.
    """
    room, pieces = room_for(len(lengths), kv_heads), np.ones(len(lengths), np.int64)
    if len(live := np.flatnonzero(lengths)):
        pieces[live] = _pieces(lengths[live].astype(np.int64), kv_heads, programs)
    while pieces.sum() > room:
        pieces = np.maximum(3 * pieces // 4, 1)
    order = np.argsort(-lengths / pieces, kind="stable")
    row, ends = np.repeat(order, pieces[order]), np.cumsum(pieces[order])
    number = np.arange(len(row)) - np.repeat(ends - pieces[order], pieces[order])
    shares = np.full((room, SHARE_FIELDS), -1, np.int64)
    shares[: len(row)] = np.stack([row, number, pieces[row]], axis=1)
    return shares


def _pieces(lengths: Ints, kv_heads: int, programs: int) -> Ints:
    """How many programs share each sequence, for each KV head.

    Sequences of about one length have one. Those that are left when they have filled, once or often, what runs at once
    have as many as make them end first: else many programs would wait for as long as a sequence takes. Sequences of
    many lengths are cut into shares of half of what a program has to do, so that short ones fill the gaps beside long
    ones.
    """
    count, total = len(lengths), int(lengths.sum())
    if lengths.max() * count <= _EVEN * total:
        pieces: Ints = np.ones(count, np.int64)
        if left := count * kv_heads % programs:
            tried = np.arange(1, 1 + max(_TRIED, programs // left))
            taken = -(-left * tried // programs) * (1 / tried + _SHARING)
            pieces[count - -(-left // kv_heads) :] = tried[taken.argmin()]
    else:
        pieces = -(-2 * programs * lengths // (total * kv_heads))
    return np.clip(pieces, 1, -(-lengths // _LEAST))
