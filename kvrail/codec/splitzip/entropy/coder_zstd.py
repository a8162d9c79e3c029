"""zstd as an entropy coder: in codes there is next to nothing to match, so what works is its Huffman stage."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import zstandard

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes

_In = TypeVar("_In")
_Out = TypeVar("_Out")

LEVEL = 1
"""The lowest that codes literals: lower ones only look for matches; higher ones look longer for what is not there."""
THREADS = 2
"""Two pieces of a payload are large: the codes of the keys and those of the values."""
PARALLEL_BYTES = 256 * 1024
"""Pieces of fewer bytes in all are done in the caller's thread: waking another takes as long as they do."""


class ZstdCoder:
    """Each piece is one zstd frame that states its size."""

    finds_repeats = True

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="zstd")

    def compress(self, pieces: Sequence[Bytes]) -> list[Bytes]:
        """Each piece, coded by itself."""
        return self._map(_compress, pieces, pieces)

    def decompress(self, coded: Sequence[Bytes], pieces: Sequence[Bytes]) -> None:
        """Fill each of `pieces`; raises CodecError where its coded form is corrupt or of another size."""
        self._map(_decompress, list(zip(coded, pieces, strict=True)), pieces)

    def _map(self, do: Callable[[_In], _Out], arguments: Sequence[_In], pieces: Sequence[Bytes]) -> list[_Out]:
        if sum(piece.size for piece in pieces) < PARALLEL_BYTES:
            return [do(argument) for argument in arguments]
        futures = [self._threads.submit(do, argument) for argument in arguments]
        wait(futures)  # for all, even where one fails: the caller will use again the memory that the others write to
        return [future.result() for future in futures]


def _compress(piece: Bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(level=LEVEL).compress(piece.data), dtype=np.uint8)


def _decompress(argument: tuple[Bytes, Bytes]) -> None:
    coded, piece = argument
    try:
        size = zstandard.frame_content_size(coded.data)
        if size == piece.size:
            size = zstandard.ZstdDecompressor().stream_reader(coded.data).readinto(piece.data)
    except zstandard.ZstdError as error:
        raise CodecError(f"a coded piece of a payload is corrupt: {error}") from error
    if size != piece.size:
        raise CodecError(f"a coded piece of a payload gives {size} bytes; by the header it has {piece.size}")
