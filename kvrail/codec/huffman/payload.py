"""The container: header, shape, index of chunks. README.md has the bytes."""

import math
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as digest

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.huffman.format import BY_NUMBER, Format

MAGIC = b"KVHF"
VERSION = 1
_HEADER = struct.Struct("<4s6B6xQQQ")
HEADER_BYTES = _HEADER.size
_DELTA = 1
MAX_CHUNK_BITS = 20
MAX_DIMENSIONS = 32
MAX_MODE = 5
SIZE_BITS = 28
_DIGEST, _ROW = np.dtype("<u8"), np.dtype("<u4")
_SIZES = np.uint32((1 << SIZE_BITS) - 1)


@dataclass(frozen=True, eq=False)
class Layout:
    """What a container says before its chunks.

    shape: of the tensor. chunk_bits: binary logarithm of a chunk's words. base_digest: of the bytes that were taken
    off by exclusive or, or None.
    rows: uint32 [chunks, planes], each plane's bytes and, from bit 28 on, its mode; digests: uint64 [chunks].
    """

    format: Format
    shape: tuple[int, ...]
    chunk_bits: int
    base_digest: int | None
    rows: npt.NDArray[np.uint32]
    digests: npt.NDArray[np.uint64]

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.format.item_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk of the tensor; the last one may have fewer."""
        return self.format.word_bytes << self.chunk_bits

    @property
    def head_bytes(self) -> int:
        """Bytes before the first chunk."""
        return HEADER_BYTES + 8 * len(self.shape) + self.digests.nbytes + self.rows.nbytes

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Coded bytes of each chunk, int64 [chunks]."""
        sizes = self.rows & _SIZES
        if sizes.shape[1] == 1:
            return sizes[:, 0].astype(np.int64)
        found: npt.NDArray[np.int64] = np.add.reduce(sizes, axis=1, dtype=np.int64)
        return found

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each chunk ends, counted from the first one's start, int64 [chunks]."""
        return self.sizes.cumsum()

    def head(self) -> bytes:
        """All bytes before the first chunk."""
        rest = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        rest += self.digests.astype("<u8").tobytes() + self.rows.astype("<u4").tobytes()
        flags = 0 if self.base_digest is None else _DELTA
        fields = (flags, self.chunk_bits, len(self.shape), self.format.word_bytes)

        def header(check: int) -> bytes:
            return _HEADER.pack(
                MAGIC, VERSION, self.format.number, *fields, self.base_digest or 0, len(self.digests), check
            )

        return header(digest(header(0) + rest)) + rest


def chunks_of(raw_bytes: int, chunk_bytes: int) -> int:
    """How many chunks a tensor is cut into."""
    return -(-raw_bytes // chunk_bytes)


def parse(source: Bytes) -> Layout:
    """Read what stands before the chunks, and check all of it.

    source: the whole container. Raises CodecError that says what is wrong with it.
    """
    if source.size < HEADER_BYTES:
        raise CodecError(
            f"a huffman container has at least {HEADER_BYTES} bytes, this one {source.size}: it is cut off"
        )
    magic, version, number, flags, chunk_bits, ndim, planes, base, chunks, check = _HEADER.unpack_from(source.data)
    if magic != MAGIC:
        raise CodecError(f"this is no huffman container: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise CodecError(f"the huffman container has version {version}; this code reads {VERSION}, so update it")
    known = BY_NUMBER.get(number)
    if known is None or planes != known.word_bytes or flags > _DELTA:
        raise CodecError(f"the header is damaged: element type {number} with {planes} planes and flags {flags}")
    if chunk_bits > MAX_CHUNK_BITS or ndim > MAX_DIMENSIONS:
        raise CodecError(f"the header is damaged: chunks of 2^{chunk_bits} words, {ndim} dimensions")
    start = HEADER_BYTES + 8 * ndim
    head = start + chunks * (8 + 4 * planes)
    if head > source.size:
        raise CodecError(f"the index of {chunks} chunks ends at byte {head} of {source.size}: the container is cut off")
    text = source[:head].tobytes()
    cleared = np.frombuffer(text[: HEADER_BYTES - 8] + bytes(8) + text[HEADER_BYTES:], dtype=np.uint8)
    if digest(cleared.data) != check:
        raise CodecError("header and index do not match their checksum: the container is damaged")
    shape = struct.unpack_from(f"<{ndim}Q", text, HEADER_BYTES)
    digests = np.frombuffer(text, _DIGEST, chunks, start)
    rows = np.frombuffer(text, _ROW, chunks * planes, start + 8 * chunks).reshape(chunks, planes)
    layout = Layout(known, shape, chunk_bits, base if flags & _DELTA else None, rows, digests)
    _check(layout, source.size)
    return layout


def _check(layout: Layout, container_bytes: int) -> None:
    """Raise CodecError where shape, index and length do not agree."""
    chunks = len(layout.digests)
    if math.prod(max(size, 1) for size in layout.shape) * layout.format.item_bytes >= 1 << 63:
        raise CodecError(f"no tensor has shape {list(layout.shape)}: the header is damaged")
    if chunks != chunks_of(layout.raw_bytes, layout.chunk_bytes):
        raise CodecError(f"a tensor of {layout.raw_bytes} bytes does not have {chunks} chunks: the header is damaged")
    if chunks and int(layout.rows.max()) >> SIZE_BITS > MAX_MODE:
        raise CodecError(f"the index has a mode above {MAX_MODE}: it is damaged, or of a later version")
    found = layout.head_bytes + (int(layout.ends[-1]) if chunks else 0)
    if found != container_bytes:
        raise CodecError(f"the chunks end at byte {found} of {container_bytes}: the container is cut off or too long")
