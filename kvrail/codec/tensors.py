"""Codecs of whole tensors, by name and by the bytes that their containers begin with."""

import functools
import importlib
from typing import Protocol

import torch

from kvrail.codec.base import CodecError, Payload
from kvrail.codec.core.host import host_bytes
from kvrail.codec.registry import UnknownCodecError

_MAKERS = {"huffman": ("kvrail.codec.huffman.codec", "HuffmanCodec")}
_MAGIC_BYTES = 4


class TensorCodec(Protocol):
    """A tensor to self-describing bytes and back, bit for bit. Made once; any thread may use it."""

    name: str
    magic: bytes  # the first four bytes of what it makes
    dtypes: frozenset[str]  # element types that it takes

    def encode(self, tensor: torch.Tensor, *, base: torch.Tensor | None = None) -> memoryview:
        """Bytes of `tensor`, read-only; base: of the same shape and type, taken off first. Raises CodecError."""
        ...

    def decode(self, payload: Payload, *, base: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor, in host memory. Raises CodecError where the bytes are not whole or the base is another one."""
        ...


def names() -> tuple[str, ...]:
    """Names of all codecs of tensors."""
    return tuple(_MAKERS)


@functools.cache
def get(name: str) -> TensorCodec:
    """The codec called `name`; raises UnknownCodecError, which lists the names there are."""
    if name not in _MAKERS:
        raise UnknownCodecError(f"tensor codec {name!r} is unknown; choose one of {', '.join(_MAKERS)}")
    module, maker = _MAKERS[name]
    codec: TensorCodec = getattr(importlib.import_module(module), maker)()
    return codec


def of(payload: Payload) -> TensorCodec:
    """The codec that made these bytes. Raises CodecError where none did."""
    magic = host_bytes("decode", payload)[:_MAGIC_BYTES].tobytes()
    for name in _MAKERS:
        if get(name).magic == magic:
            return get(name)
    raise CodecError(
        f"the bytes begin with {magic!r}, as those of no tensor codec do: they are damaged or something else"
    )
