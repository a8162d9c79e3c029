"""Codecs by name. A codec's module is imported when the codec is asked for, not before."""

import importlib
from typing import TYPE_CHECKING

from codec.base import Codec

if TYPE_CHECKING:
    from codec.splitzip.codebook import Codebook

# Where each codec is made, and whether it takes a codebook.
_CODECS = {
    "raw": ("codec.raw.codec", "RawCodec", False),
    "splitzip": ("codec.splitzip.codec", "splitzip", True),
    "splitzip-channel": ("codec.splitzip.codec", "splitzip_channel", False),
    "splitzip-zstd": ("codec.splitzip.entropy", "splitzip_zstd", False),
}


class UnknownCodecError(LookupError):
    """No codec has this name."""


def names() -> tuple[str, ...]:
    """Names of all codecs."""
    return tuple(_CODECS)


def get(name: str, codebook: "Codebook | None" = None) -> Codec:
    """Make the codec called `name`; raises UnknownCodecError, which lists the names there are.

    codebook: for codecs that take one; without, they use the one that ships.
    """
    if name not in _CODECS:
        raise UnknownCodecError(f"codec {name!r} is unknown; choose one of {', '.join(_CODECS)}")
    module, maker, calibrated = _CODECS[name]
    make = getattr(importlib.import_module(module), maker)
    codec: Codec = make(codebook) if calibrated else make()
    return codec
