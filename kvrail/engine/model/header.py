"""The header of a safetensors file, which says where each tensor's bytes lie. Everything in it is checked here."""

import json
import math
import os
import reprlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kvrail.errors import ConfigError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own reader."""
MAX_DIMENSIONS = 64
"""More than any tensor has, so that the product of all sizes stays a small number."""
_SHOWN_CHARS = 300
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200

CODED_AS = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""torch's name of each element type; tensors of other types are coded as bytes."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file: where its bytes begin and end, counted from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a file, as they are, and its tensors in the order of their bytes, which leave no gap."""

    raw: bytes
    tensors: tuple[Tensor, ...]

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.tensors[-1].end if self.tensors else len(self.raw)


def open_file(path: Path) -> BinaryIO:
    """Open a file of weights for reading. Raises ConfigError where it is no file or cannot be read."""
    try:
        if path.is_file():
            return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; make it readable or fetch it again") from None
    raise ConfigError(f"{path} is no file; fetch it again or delete it")


def read_header(path: Path) -> Header:
    """The header of a safetensors file, which fits the file's size. Raises ConfigError where it does not."""
    with open_file(path) as file:
        found = os.fstat(file.fileno()).st_size
        first = file.read(LENGTH_BYTES)
        size = _header_bytes(first, str(path))
        if size > found:
            raise ConfigError(f"{path} has {found} bytes, its header alone {size}; fetch it again")
        header = parse_header(first + file.read(size - LENGTH_BYTES), str(path))
    if found != header.file_bytes:
        raise ConfigError(f"{path} has {found} bytes, its header says {header.file_bytes}; fetch it again")
    return header


def _header_bytes(first: bytes, name: str) -> int:
    """Bytes of the header, its length field included, from the file's first eight. Raises ConfigError."""
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or length > MAX_HEADER_BYTES:
        raise ConfigError(f"{name} does not begin as safetensors files do; fetch it again")
    return LENGTH_BYTES + length


def parse_header(raw: bytes, name: str) -> Header:
    """Read a header, its length included. Raises ConfigError where it is none, or tensors overlap or leave gaps."""
    if _header_bytes(raw[:LENGTH_BYTES], name) != len(raw):
        raise ConfigError(f"the header of {name} has {len(raw)} bytes, and says another number; fetch the file again")
    try:
        found = parse_json(raw[LENGTH_BYTES:])
        if not isinstance(found, dict):
            raise ValueError(f"it is {shown(found)}, not an object")
        tensors = [_tensor(key, value, len(raw)) for key, value in found.items() if key != "__metadata__"]
    except ValueError as error:
        raise ConfigError(f"the header of {name} cannot be read ({error}); fetch the file again") from None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    at = len(raw)
    for tensor in tensors:
        if tensor.begin != at:
            raise ConfigError(
                f"tensor {shown(tensor.name)} of {name} begins at byte {tensor.begin}, not {at}; fetch the file again"
            )
        at = tensor.end
    return Header(raw, tuple(tensors))


def _tensor(name: str, about: Any, start: int) -> Tensor:
    """A tensor, from its entry in the header. Raises ValueError."""
    match about:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError(f"of tensor {shown(name)} it says {shown(about)}")
    elements = math.prod(max(size, 1) for size in shape) if len(shape) <= MAX_DIMENSIONS and are_sizes(*shape) else 0
    if not 0 < elements < 1 << 63:
        raise ValueError(f"tensor {shown(name)} has shape {shown(shape)}")
    bits = element_bits(dtype)
    taken = bits * math.prod(shape)
    if not are_sizes(begin, end) or begin > end or (bits and taken != 8 * (end - begin)):
        raise ValueError(
            f"tensor {shown(name)} of type {shown(dtype)} and shape {shown(shape)} has data_offsets"
            f" {shown([begin, end])}"
        )
    return Tensor(name, dtype, tuple(shape), start + begin, start + end)


def element_bits(dtype: str) -> int:
    """Bits of an element; 0 where torch lacks the type."""
    if dtype not in CODED_AS:
        return 0
    found: torch.dtype = getattr(torch, CODED_AS[dtype])
    return 8 * found.itemsize // (2 if dtype == "F4" else 1)


def are_sizes(*values: object) -> bool:
    """Whether all values are whole numbers that can be sizes in bytes."""
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def parse_json(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError where it is invalid, nested too deeply, or has a name twice."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has {shown(twice)} twice")
    return found


def shown(value: object) -> str:
    """A value from a file as an error shows it, cut where it is long or deep."""
    return _SHORT.repr(value)[:_SHOWN_CHARS]
