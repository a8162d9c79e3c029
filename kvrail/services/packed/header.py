"""The header of a safetensors file: which bytes of it are which tensor."""

import json
import math
from dataclasses import dataclass
from typing import Any

from kvrail.errors import ConfigError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""As the format's own reader has it."""

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
"""torch's name of each element type; of others the bytes are coded."""


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


def header_bytes(first: bytes, name: str) -> int:
    """How many bytes the header has, its length included, given the file's first eight. Raises ConfigError."""
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or length > MAX_HEADER_BYTES:
        raise ConfigError(f"{name} does not begin as safetensors files do; fetch it again")
    return LENGTH_BYTES + length


def parse_header(raw: bytes, name: str) -> Header:
    """Read a header, its length included. Raises ConfigError where it is none, or tensors overlap or leave gaps."""
    try:
        found = json.loads(raw[LENGTH_BYTES:].decode())
        tensors = [_tensor(key, value, len(raw)) for key, value in found.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the header of {name} cannot be read ({error}); fetch the file again") from None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    at = len(raw)
    for tensor in tensors:
        if tensor.begin != at or tensor.end < at:
            raise ConfigError(
                f"tensor {tensor.name!r} of {name} begins at byte {tensor.begin}, not {at}: write it anew"
            )
        at = tensor.end
    return Header(raw, tuple(tensors))


def _tensor(name: str, value: dict[str, Any], start: int) -> Tensor:
    begin, end = (int(offset) for offset in value["data_offsets"])
    shape = tuple(int(size) for size in value["shape"])
    if min(shape, default=0) < 0 or math.prod(shape) >= 1 << 63:
        raise ValueError(f"{name} has shape {shape}")
    return Tensor(name, str(value["dtype"]), shape, start + begin, start + end)
