"""nvCOMP's ANS as an entropy coder, on the current CUDA device; needs the extra `ans`.

Pieces lie on the host, as they do for every coder: they cross the bus to the device and come back coded. It is for
links that are far slower than the bus.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes

NEEDS = "a CUDA device and nvCOMP (pip install 'kvrail[ans]')"
CHECKSUM_BYTES = 8
CHUNK_BYTES = 256 * 1024
"""What ANS codes by itself, with a table of its own: larger chunks are a little denser and much slower."""


class AnsCoder:
    """Each piece is one stream of nvCOMP's native format and the XXH3-64 of it, little-endian.

    nvCOMP decodes a stream with a wrong bit to wrong bytes, whatever its own policy of checksums; so it gets none.
    """

    finds_repeats = False

    def __init__(self) -> None:
        self._local = threading.local()

    def compress(self, pieces: Sequence[Bytes]) -> list[Bytes]:
        """Each piece, coded by itself."""
        with torch.cuda.stream(self._stream):
            sources = [torch.from_numpy(piece).cuda() for piece in pieces]
            coded = [self._to_host(self._codec.encode(nvcomp_array(source))) for source in sources]
        return [np.concatenate([stream, _checksum(stream)]) for stream in coded]

    def decompress(self, coded: Sequence[Bytes], pieces: Sequence[Bytes]) -> None:
        """Fill each of `pieces`; raises CodecError where its coded form is corrupt or of another size."""
        with torch.cuda.stream(self._stream):
            for source, piece in zip(coded, pieces, strict=True):
                stream = source[:-CHECKSUM_BYTES]
                if source.size < CHECKSUM_BYTES or not np.array_equal(_checksum(stream), source[-CHECKSUM_BYTES:]):
                    raise CodecError("a coded piece of a payload is corrupt: its checksum is another")
                try:
                    data = self._to_host(
                        self._codec.decode(nvcomp_array(torch.from_numpy(stream.copy()).cuda()), "|u1")
                    )
                except RuntimeError as error:
                    raise CodecError(f"a coded piece of a payload is corrupt: {error}") from error
                if data.size != piece.size:
                    raise CodecError(
                        f"a coded piece of a payload gives {data.size} bytes; by the header it has {piece.size}"
                    )
                piece[:] = data

    def _to_host(self, array: Any) -> Bytes:
        data: Bytes = torch.as_tensor(array, device="cuda").view(torch.uint8).flatten().cpu().numpy()
        return data

    @property
    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._local.stream
        return stream

    @property
    def _codec(self) -> Any:
        """The codec of this thread and its stream."""
        if not hasattr(self._local, "codec"):
            from nvidia import nvcomp

            self._local.codec = nvcomp.Codec(
                algorithm="ANS",
                data_type="|u1",
                uncomp_chunk_size=CHUNK_BYTES,
                cuda_stream=self._stream.cuda_stream,
            )
        return self._local.codec


def _checksum(stream: Bytes) -> Bytes:
    return np.frombuffer(xxhash.xxh3_64(stream.data).intdigest().to_bytes(CHECKSUM_BYTES, "little"), dtype=np.uint8)


def nvcomp_array(tensor: torch.Tensor) -> Any:
    """A view of a tensor in device memory, as nvCOMP takes it."""
    from nvidia import nvcomp

    return nvcomp.as_array(tensor)


def is_available() -> bool:
    """Whether the package is installed and there is a CUDA device."""
    if not torch.cuda.is_available():
        return False
    try:
        from nvidia import nvcomp  # noqa: F401
    except ImportError:
        return False
    return True
