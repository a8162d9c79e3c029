"""A packed file: one safetensors file, its tensors coded one by one, its header as it was.

    offset  bytes
         0  8      magic "KVRPACK1"
                   the tensors' containers (kvrail/codec/huffman), in the order of their bytes
                   the index, JSON
       -32  8      where the index begins
        -24 8      its bytes
        -16 8      its XXH3-64
         -8 8      magic "KVRPACK1"

All numbers are little-endian. The index comes last, so that a file is written in one pass, tensor by tensor. Each
tensor can be decoded alone.
"""

import json
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvrail.codec.base import CodecError
from kvrail.codec.huffman.codec import HuffmanCodec
from kvrail.codec.huffman.cpu import fresh
from kvrail.codec.huffman.payload import parse
from kvrail.engine.model.header import Header, Tensor, are_sizes, open_file, parse_header, parse_json, shown
from kvrail.errors import ConfigError

MAGIC = b"KVRPACK1"
SUFFIX = ".packed"
"""The suffix that a packed file adds to the name of its original."""
_TAIL = struct.Struct("<QQQ8s")
CODEC = HuffmanCodec()
digest = xxh3_64_intdigest

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Part:
    """A coded tensor: where its container lies in the packed file, and the XXH3-64 of its bytes, uncoded."""

    offset: int
    size: int
    raw_digest: int


@dataclass(frozen=True, slots=True)
class Base:
    """The base of deltas: its folder, as it was named, and whether each tensor is a delta."""

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


class PackedFile(AbstractContextManager["PackedFile"]):
    """A packed file, open for reading; a context manager.

    header: of the safetensors file; parts: as many as it has tensors. Raises ConfigError where the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name.removesuffix(SUFFIX)
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(MAGIC) + _TAIL.size:
                raise self._damaged("it is cut off")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data: Bytes = np.frombuffer(self._map, np.uint8)
        start, length, check, magic = _TAIL.unpack(self._map[-_TAIL.size :])
        if magic != MAGIC or self._map[: len(MAGIC)] != MAGIC or start + length + _TAIL.size != size:
            raise self._damaged("its first or last bytes are not those of a packed file")
        index = self._map[start : start + length]
        if digest(index) != check:
            raise self._damaged("its index does not match its checksum")
        try:
            self._read(index, start)
        except ValueError as error:
            raise self._damaged(f"its index cannot be read: {error}") from None
        self._check_containers()

    def _read(self, index: bytes, end: int) -> None:
        """Read the index. Raises ValueError where it is not as `write_index` makes it."""
        fields = parse_json(index)
        match fields:
            case {"format": "kvrail-packed", "version": int(version), "codec": str(codec)}:
                pass
            case _:
                raise ValueError(f"{shown(fields)} has no format, version and codec")
        if version != 1 or codec != CODEC.name:
            raise ConfigError(
                f"{self.path} is of version {shown(version)}, codec {shown(codec)}; this kvrail reads version 1 and"
                f" {CODEC.name!r}, so update it"
            )
        match fields:
            case {"header": str(header), "parts": list(parts), "base": base}:
                pass
            case _:
                raise ValueError("header, parts or base are missing or of another type")
        self.header = parse_header(bytes.fromhex(header), str(self.path))
        self.parts = tuple(map(_part, parts))
        self.base = None if base is None else _base(base, len(parts))
        at = len(MAGIC)
        for part in self.parts:
            if part.offset != at:
                raise ValueError(f"a part begins at byte {part.offset}, not {at}")
            at += part.size
        if at != end or len(self.parts) != len(self.header.tensors):
            raise ValueError(
                f"{len(self.parts)} parts, up to byte {at} of {end}, are not those of"
                f" {len(self.header.tensors)} tensors"
            )

    def _check_containers(self) -> None:
        """Raise ConfigError where a container is not that of its tensor: before memory is taken for any."""
        for place, tensor in enumerate(self.header.tensors):
            try:
                found = parse(self.coded(place))
            except CodecError as error:
                raise self.refused(tensor, str(error)) from None
            size = tensor.end - tensor.begin
            if found.raw_bytes != size:
                raise self.refused(tensor, f"it has {size} bytes, its container {found.raw_bytes}")
            if (found.base_digest is not None) != self.is_delta(place):
                raise self.refused(tensor, "index and container differ on whether it is a delta")

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path} is damaged: {why}; copy it again or pack the model again")

    def __exit__(self, *_: object) -> None:
        del self.data
        with suppress(BufferError):  # a view that is left keeps the map
            self._map.close()

    def is_delta(self, place: int) -> bool:
        """Whether tensor number `place` is a delta."""
        return self.base is not None and self.base.delta[place]

    def coded(self, place: int) -> Bytes:
        """The container of tensor number `place`."""
        part = self.parts[place]
        return self.data[part.offset : part.offset + part.size]

    def memory(self, size: int) -> Bytes:
        """Memory for `size` decoded bytes. Raises ConfigError where the machine has too little."""
        try:
            return fresh(size)
        except CodecError as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def decode(self, place: int, out: Bytes, *, base: Bytes | None = None, threads: int = 0) -> None:
        """Write the bytes of tensor number `place` into `out`. Raises ConfigError that names file and tensor."""
        tensor = self.header.tensors[place]
        try:
            CODEC.decode_into(self.coded(place).data, out, base=base, threads=threads)
        except CodecError as error:
            raise self.refused(tensor, str(error)) from None
        if digest(out.data) != self.parts[place].raw_digest:
            raise self.refused(tensor, "what it decodes to is not what was packed")

    def refused(self, tensor: Tensor, why: str) -> ConfigError:
        """The error for a tensor that is damaged."""
        return ConfigError(
            f"tensor {shown(tensor.name)} of {self.path}: {why}; copy the file again or pack the model again"
        )


def _part(value: Any) -> Part:
    match value:
        case [offset, size, int(check)] if are_sizes(offset, size) and 0 <= check < 1 << 64:
            return Part(offset, size, check)
    raise ValueError(f"a part is {shown(value)}")


def _base(value: Any, count: int) -> Base:
    match value:
        case {"folder": str(folder), "delta": list(delta)} if len(delta) == count and all(
            type(each) is bool for each in delta
        ):
            return Base(folder, tuple(delta))
    raise ValueError(f"of {count} parts, base is {shown(value)}")
