"""Frames: one stage of one block with a header that says all about it.

A frame is a header, zero padding to a multiple of 16 bytes, and the payload. Numbers are little-endian:

    offset  size  field
         0     4  magic "KVRF"
         4     2  format version, 1
         6     2  header length: padding included, so the offset of the payload
         8     8  checksum: XXH3-64 over the whole frame, with these eight bytes taken as zero
        16     8  payload length
        24     8  raw length: bytes of the block's tensors, uncompressed
        32     4  sequence: number of this frame in its transfer, from 0
        36     2  stage
        38     2  number of stages of the codec
        40    24  layers, pages, page size, KV heads, key dim, value dim (4 bytes each)
        64     4  first layer
        68     4  first page: logical index in the request
        72     1  whether elements carry scales, 0 or 1
        73     3  lengths of the three strings (1 byte each)
        76        codec (ASCII), dtype (ASCII), request id (UTF-8)

Golden files in tests/codec/golden pin it. A change of the format is a new version.
"""

import struct
from dataclasses import dataclass

import xxhash

from codec.base import BlockSpec, CodecError

MAGIC = b"KVRF"
VERSION = 1
ALIGNMENT = 16
MAX_HEADER_BYTES = 1024
"""No header is longer: its fixed part and three strings of up to 255 bytes."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e5m2": 1, "float8_e4m3fn": 1}
"""Element types that blocks may have, with their size in bytes."""

_FIXED = struct.Struct("<4sHHQQQIHH6I2I4B")
_CHECKSUM = slice(8, 16)
_NO_CHECKSUM = bytes(8)


class FrameFormatError(CodecError):
    """A frame is malformed, corrupt, or not the one that its receiver expects."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame carries: stage `stage` of the block `spec`, which lies at (`first_layer`, `first_page`).

    first_page is a logical index in the request, sequence the frame's number in its transfer, from 0.
    """

    request_id: str
    codec: str
    stage: int
    num_stages: int
    spec: BlockSpec
    first_layer: int
    first_page: int
    sequence: int

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """First layer, layers, first page, pages: equal in all stages of a block."""
        return self.first_layer, self.spec.num_layers, self.first_page, self.spec.num_pages


def _raw_bytes(spec: BlockSpec) -> int:
    """Bytes of the block's tensors; as BlockSpec.raw_bytes, but safe for numbers from the network."""
    heads = spec.num_layers * spec.num_pages * spec.page_size * spec.num_kv_heads
    return heads * ((spec.key_dim + spec.value_dim) * ITEM_BYTES[spec.dtype] + (8 if spec.scaled else 0))


def _validate(header: FrameHeader) -> None:
    """Refuse what no block can have, whichever end it comes from."""
    spec = header.spec
    if spec.dtype not in ITEM_BYTES:
        raise FrameFormatError(f"frame has dtype {spec.dtype!r}; known are {', '.join(ITEM_BYTES)}")
    for name in ("num_layers", "num_pages", "page_size", "num_kv_heads", "key_dim", "value_dim"):
        if getattr(spec, name) < 1:
            raise FrameFormatError(f"frame has {name} {getattr(spec, name)}; it must be at least 1")
    if not 0 <= header.stage < header.num_stages:
        raise FrameFormatError(f"frame has stage {header.stage} of {header.num_stages}")
    if not header.codec:
        raise FrameFormatError("frame has an empty codec name")


def _header_bytes(header: FrameHeader, payload_bytes: int) -> bytes:
    """Encode the header with its padding, the checksum still zero."""
    _validate(header)
    spec = header.spec
    texts = (header.codec.encode("ascii"), spec.dtype.encode("ascii"), header.request_id.encode())
    length = _FIXED.size + sum(map(len, texts))
    length += -length % ALIGNMENT
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        length,
        0,
        payload_bytes,
        _raw_bytes(spec),
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
        header.first_page,
        spec.scaled,
        *map(len, texts),
    )
    return b"".join((fixed, *texts)).ljust(length, b"\0")


def pack(header: FrameHeader, payload: memoryview) -> bytes:
    """Join header and payload (contiguous) to one frame; the payload is copied once.

    Raises FrameFormatError where a value does not fit its field.
    """
    return b"".join((head_of(header, payload), payload))


def head_of(header: FrameHeader, payload: memoryview) -> bytes:
    """What stands before `payload` (contiguous) in its frame, the checksum over both included.

    Raises FrameFormatError where a value does not fit its field.
    """
    payload = payload.cast("B")
    try:
        head = bytearray(_header_bytes(header, payload.nbytes))
    except (struct.error, UnicodeEncodeError) as error:
        raise FrameFormatError(f"a field does not fit the frame's header: {error}; {header}") from error
    checksum = xxhash.xxh3_64(head)
    checksum.update(payload)
    head[_CHECKSUM] = checksum.intdigest().to_bytes(8, "little")
    return bytes(head)


def _check_lengths(view: memoryview, max_payload_bytes: int) -> int:
    """Check what can be told before the checksum; returns the header's length."""
    if view.nbytes < _FIXED.size:
        raise FrameFormatError(f"frame has {view.nbytes} bytes; a header alone has {_FIXED.size}")
    magic, version, length, _, payload_bytes = _FIXED.unpack_from(view)[:5]
    if magic != MAGIC:
        raise FrameFormatError(f"frame has magic {magic!r}; it must be {MAGIC!r}")
    if version != VERSION:
        raise FrameFormatError(f"frame has format version {version}; this build reads {VERSION}")
    if payload_bytes > max_payload_bytes:
        raise FrameFormatError(f"frame has a payload of {payload_bytes} bytes; at most {max_payload_bytes} are allowed")
    if length % ALIGNMENT or length < _FIXED.size or view.nbytes != length + payload_bytes:
        raise FrameFormatError(
            f"frame has {view.nbytes} bytes; it says header length {length} and payload length {payload_bytes}"
        )
    return int(length)


def unpack(frame: bytes | memoryview, max_payload_bytes: int) -> tuple[FrameHeader, memoryview]:
    """Check a frame and give its header and its payload, a view into `frame`.

    Raises FrameFormatError, naming field and value, where the frame is torn, corrupt, oversized or malformed.
    """
    view = memoryview(frame).cast("B")
    length = _check_lengths(view, max_payload_bytes)
    checksum = xxhash.xxh3_64(view[: _CHECKSUM.start])
    checksum.update(_NO_CHECKSUM)
    checksum.update(view[_CHECKSUM.stop :])
    fields = _FIXED.unpack_from(view)
    if checksum.intdigest() != fields[3]:
        raise FrameFormatError(f"frame has checksum {fields[3]:016x}, its bytes give {checksum.hexdigest()}")
    raw_bytes, sequence, stage, num_stages = fields[5:9]
    layers, pages, page_size, heads, key_dim, value_dim = fields[9:15]
    first_layer, first_page, scaled, codec_end, dtype_end, request_end = fields[15:]
    codec_end += _FIXED.size
    dtype_end += codec_end
    request_end += dtype_end
    if request_end + -request_end % ALIGNMENT != length or scaled > 1:
        raise FrameFormatError(f"frame has strings to offset {request_end}, a header of {length} and scaled {scaled}")
    try:
        codec = str(view[_FIXED.size : codec_end], "ascii")
        dtype = str(view[codec_end:dtype_end], "ascii")
        request_id = str(view[dtype_end:request_end], "utf-8")
    except UnicodeDecodeError as error:
        raise FrameFormatError(f"frame has a string that is not text: {error}") from error
    spec = BlockSpec(dtype, layers, pages, page_size, heads, key_dim, value_dim, bool(scaled))
    header = FrameHeader(request_id, codec, stage, num_stages, spec, first_layer, first_page, sequence)
    _validate(header)
    if raw_bytes != _raw_bytes(spec):
        raise FrameFormatError(f"frame has raw length {raw_bytes}; its block has {_raw_bytes(spec)} bytes")
    return header, view[length:]

