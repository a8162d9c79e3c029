"""A packed file: one safetensors file, its tensors coded one by one, its header as it was.

    offset  bytes
         0  8      magic "KVRPACK1"
                   the tensors' containers (kvrail/codec/huffman), in the order of their bytes
                   the index, JSON
       -32  8      where the index begins
        -24 8      its bytes
        -16 8      its XXH3-64
         -8 8      magic "KVRPACK1"

All numbers are little-endian. The index comes last, so that a file is written in one go, tensor by tensor. Any tensor
is decoded alone.
"""

import json
import mmap
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import CodecError
from kvrail.codec.core.digest import DigestKind, digest_of
from kvrail.codec.huffman.codec import HuffmanCodec
from kvrail.errors import ConfigError
from kvrail.services.packed.header import Header, Tensor, parse_header

MAGIC = b"KVRPACK1"
SUFFIX = ".packed"
"""What a packed file's name has behind that of the file it was made of."""
_TAIL = struct.Struct("<QQQ8s")
CODEC = HuffmanCodec()

Bytes = npt.NDArray[np.uint8]


def digest(data: bytes | memoryview) -> int:
    """XXH3-64."""
    return digest_of(memoryview(data), DigestKind.XXH3).value


@dataclass(frozen=True, slots=True)
class Part:
    """A coded tensor: where its container lies in the packed file, and the XXH3-64 of its bytes, uncoded."""

    offset: int
    size: int
    raw_digest: int


@dataclass(frozen=True, slots=True)
class Base:
    """What deltas were made against: a folder, as it was named; of each tensor, whether it is a delta."""

    folder: str
    delta: tuple[bool, ...]


def write_index(header: Header, parts: Sequence[Part], base: Base | None) -> bytes:
    """Index and tail, which complete a packed file."""
    start = parts[-1].offset + parts[-1].size if parts else len(MAGIC)
    fields = {
        "format": "kvrail-packed",
        "version": 1,
        "codec": CODEC.name,
        "header": header.raw.hex(),
        "parts": [[part.offset, part.size, part.raw_digest] for part in parts],
        "base": None if base is None else asdict(base),
    }
    index = json.dumps(fields, separators=(",", ":")).encode()
    return index + _TAIL.pack(start, len(index), digest(index), MAGIC)


class PackedFile:
    """A packed file, open for reading; a context manager.

    header: of the safetensors file; parts: as many as it has tensors. Raises ConfigError where the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name.removesuffix(SUFFIX)
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < len(MAGIC) + _TAIL.size:
                raise self._damaged("it is cut off")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data: Bytes = np.frombuffer(self._map, np.uint8)
        start, length, check, magic = _TAIL.unpack(self._map[size - _TAIL.size :])
        if magic != MAGIC or self._map[: len(MAGIC)] != MAGIC or start + length + _TAIL.size != size:
            raise self._damaged("its first or last bytes are not those of a packed file")
        index = self._map[start : start + length]
        if digest(index) != check:
            raise self._damaged("its index does not match its checksum")
        self._read(json.loads(index), start)

    def _read(self, fields: dict[str, Any], end: int) -> None:
        if fields.get("version") != 1 or fields.get("codec") != CODEC.name:
            raise ConfigError(
                f"{self.path} is of version {fields.get('version')}, codec {fields.get('codec')!r}; this kvrail reads"
                f" version 1 and {CODEC.name!r}, so update it"
            )
        self.header = parse_header(bytes.fromhex(fields["header"]), self.name)
        self.parts = tuple(Part(*part) for part in fields["parts"])
        base = fields["base"]
        self.base = base and Base(base["folder"], tuple(base["delta"]))
        at = len(MAGIC)
        for part in self.parts:
            if part.offset != at:
                raise self._damaged("its index has gaps")
            at += part.size
        if at != end or len(self.parts) != len(self.header.tensors):
            raise self._damaged("its index does not fit its tensors")

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path} is damaged: {why}; copy it again or pack the model anew")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        del self.data
        with suppress(BufferError):  # where a view is left, the map goes with it
            self._map.close()

    def coded(self, place: int) -> Bytes:
        """The container of tensor number `place`."""
        part = self.parts[place]
        return self.data[part.offset : part.offset + part.size]

    def decode(self, place: int, out: Bytes, *, base: Bytes | None = None, threads: int = 0) -> None:
        """Write the bytes of tensor number `place` into `out`. Raises ConfigError that names file and tensor."""
        tensor = self.header.tensors[place]
        try:
            CODEC.decode_into(self.coded(place).data, out, base=base, threads=threads)
        except CodecError as error:
            raise self.refused(tensor, str(error)) from None

    def refused(self, tensor: Tensor, why: str) -> ConfigError:
        """The error for a tensor that is damaged."""
        return ConfigError(f"tensor {tensor.name!r} of {self.path}: {why}; copy the file again or pack the model anew")
