"""Frames: one stage of one block. A head says all about it, and the payload travels beside the head, wherever it lies.

Numbers are little-endian:

    offset  size  field
         0     4  magic "KVRF"
         4     2  format version, 3
         6     2  length of the head
         8     8  checksum: XXH3-64 over the head, with these eight bytes taken as zero
        16     8  payload length
        24     8  digest of the payload (kvrail/codec/core/digest.py)
        32     8  raw length: bytes of the block's tensors, uncompressed
        40     8  parameters of the codec: its parameters_id
        48     4  sequence: number of this frame in its transfer, from 0
        52     2  stage
        54     2  number of stages of the codec
        56    24  layers, pages, page size, KV heads, key dim, value dim (4 bytes each), of the block
        80     4  first layer
        84     4  first KV head
        88     4  first page: logical index in the request
        92     1  whether elements carry scales, 0 or 1
        93     1  kind of the digest: 1 XXH3-64, 2 LANES
        94     3  lengths of the three strings (1 byte each)
        97        codec (ASCII), dtype (ASCII), request id (UTF-8)

A payload does not repeat what its head says. So the head's version also stands for the bits of all payloads.

Golden files in tests/codec/golden pin it. A change of the format is a new version.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvrail.codec.base import BlockSpec, CodecError, Payload
from kvrail.codec.core.digest import Digest, DigestKind, digest_of
from kvrail.codec.core.floats import FLOATS

MAGIC = b"KVRF"
VERSION = 3
MAX_HEAD_BYTES = 1024
"""No head is longer: its fixed part and three strings of up to 255 bytes."""

_FIXED = struct.Struct("<4sHHQQQQQIHH6I3I5B")
_CHECKSUM = slice(8, 16)
_NO_CHECKSUM = bytes(8)
_KINDS = frozenset(DigestKind)

Bounds = tuple[int, int, int, int, int, int]
"""Where a block lies, as of FrameHeader.bounds."""


class FrameFormatError(CodecError):
    """A frame is malformed, corrupt, or not the one that its receiver expects."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame carries: stage `stage` of block `spec`, which lies at (`first_layer`, `first_head`, `first_page`).

    first_page is a logical index in the request, sequence the frame's number in its transfer, from 0;
    parameters_id is the codec's.
    """

    request_id: str
    codec: str
    stage: int
    num_stages: int
    spec: BlockSpec
    first_layer: int
    first_page: int
    sequence: int
    first_head: int = 0
    parameters_id: int = 0

    @property
    def bounds(self) -> Bounds:
        """First layer, layers, first head, heads, first page, pages: equal in all stages of a block."""
        spec = self.spec
        return (self.first_layer, spec.num_layers, self.first_head, spec.num_kv_heads, self.first_page, spec.num_pages)


def _validate(header: FrameHeader) -> None:
    """Refuse what no block can have, whichever end it comes from."""
    spec = header.spec
    if spec.dtype not in FLOATS:
        raise FrameFormatError(f"frame has dtype {spec.dtype!r}; known are {', '.join(FLOATS)}")
    for name in ("num_layers", "num_pages", "page_size", "num_kv_heads", "key_dim", "value_dim"):
        if getattr(spec, name) < 1:
            raise FrameFormatError(f"frame has {name} {getattr(spec, name)}; it must be at least 1")
    if not 0 <= header.stage < header.num_stages:
        raise FrameFormatError(f"frame has stage {header.stage} of {header.num_stages}")
    if not header.codec:
        raise FrameFormatError("frame has an empty codec name")


def pack_head(header: FrameHeader, digest: Digest) -> bytes:
    """The head of a frame; digest: of its payload.

    Raises FrameFormatError where a value does not fit its field.
    """
    _validate(header)
    spec = header.spec
    try:
        texts = (header.codec.encode("ascii"), spec.dtype.encode("ascii"), header.request_id.encode())
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            _FIXED.size + sum(map(len, texts)),
            0,
            digest.payload_bytes,
            digest.value,
            spec.raw_bytes,
            header.parameters_id,
            header.sequence,
            header.stage,
            header.num_stages,
            spec.num_layers,
            spec.num_pages,
            spec.page_size,
            spec.num_kv_heads,
            spec.key_dim,
            spec.value_dim,
            header.first_layer,
            header.first_head,
            header.first_page,
            spec.scaled,
            digest.kind,
            *map(len, texts),
        )
    except (struct.error, UnicodeEncodeError) as error:
        raise FrameFormatError(f"a field does not fit the frame's head: {error}; {header}") from error
    head = bytearray(b"".join((fixed, *texts)))
    head[_CHECKSUM] = xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")
    return bytes(head)


def _check_lengths(view: memoryview, payload_bytes: int, max_payload_bytes: int) -> None:
    """Check what does not need the checksum."""
    if not _FIXED.size <= view.nbytes <= MAX_HEAD_BYTES:
        raise FrameFormatError(f"a head has {view.nbytes} bytes; it has {_FIXED.size} to {MAX_HEAD_BYTES}")
    magic, version, length, _, payload_length = _FIXED.unpack_from(view)[:5]
    if magic != MAGIC:
        raise FrameFormatError(f"a head has magic {magic!r}; it must be {MAGIC!r}")
    if version != VERSION:
        raise FrameFormatError(
            f"a head has format version {version}; this build reads {VERSION}: run all workers with the same release"
        )
    if length != view.nbytes:
        raise FrameFormatError(f"a head has {view.nbytes} bytes; it says that it has {length}")
    if payload_length != payload_bytes:
        raise FrameFormatError(f"a payload of {payload_bytes} bytes is announced; its head says {payload_length}")
    if payload_bytes > max_payload_bytes:
        raise FrameFormatError(f"frame has a payload of {payload_bytes} bytes; at most {max_payload_bytes} are allowed")


def unpack_head(head: bytes | memoryview, payload_bytes: int, max_payload_bytes: int) -> tuple[FrameHeader, Digest]:
    """Check a head; what it says, and what its payload of `payload_bytes`, as announced, must be for `check_payload`.

    So all that can be is checked before memory is taken for the payload. Raises FrameFormatError, naming field and
    value, where the head is torn, corrupt or malformed, or the payload too large.
    """
    view = memoryview(head).cast("B")
    _check_lengths(view, payload_bytes, max_payload_bytes)
    fields = _FIXED.unpack_from(view)
    checksum = xxhash.xxh3_64(view[: _CHECKSUM.start])
    checksum.update(_NO_CHECKSUM)
    checksum.update(view[_CHECKSUM.stop :])
    if checksum.intdigest() != fields[3]:
        raise FrameFormatError(f"a head has checksum {fields[3]:016x}, its bytes give {checksum.hexdigest()}")
    digest_value, raw_bytes, parameters_id, sequence, stage, num_stages = fields[5:11]
    layers, pages, page_size, heads, key_dim, value_dim = fields[11:17]
    first_layer, first_head, first_page, scaled, kind, codec_end, dtype_end, request_end = fields[17:]
    codec_end += _FIXED.size
    dtype_end += codec_end
    request_end += dtype_end
    if request_end != view.nbytes or scaled > 1 or kind not in _KINDS:
        raise FrameFormatError(
            f"a head of {view.nbytes} bytes has strings to offset {request_end}, scaled {scaled} and digest kind {kind}"
        )
    try:
        codec = str(view[_FIXED.size : codec_end], "ascii")
        dtype = str(view[codec_end:dtype_end], "ascii")
        request_id = str(view[dtype_end:request_end], "utf-8")
    except UnicodeDecodeError as error:
        raise FrameFormatError(f"a head has a string that is not text: {error}") from error
    spec = BlockSpec(dtype, layers, pages, page_size, heads, key_dim, value_dim, bool(scaled))
    place = (first_layer, first_page, sequence, first_head, parameters_id)
    header = FrameHeader(request_id, codec, stage, num_stages, spec, *place)
    _validate(header)
    if raw_bytes != spec.raw_bytes:
        raise FrameFormatError(f"a head has raw length {raw_bytes}; its block has {spec.raw_bytes} bytes")
    return header, Digest(DigestKind(kind), digest_value, payload_bytes)


def check_payload(digest: Digest, payload: Payload) -> None:
    """Raise FrameFormatError where a payload, complete and contiguous, is not the one that `digest` was made of.

    A digest of the kind that fits where the payload lies costs one read of it; the other kind takes longer.
    """
    if payload.nbytes != digest.payload_bytes:
        raise FrameFormatError(f"a payload has {payload.nbytes} bytes; its head says {digest.payload_bytes}")
    found = digest_of(payload, digest.kind)
    if found != digest:
        raise FrameFormatError(
            f"a payload has digest {found.value:016x}; its head says {digest.value:016x} ({digest.kind.name})"
        )
