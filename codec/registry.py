"""Codecs by name. A codec's module is imported when the codec is asked for, not before."""

import importlib

from codec.base import Codec

_CODECS = {
    "raw": ("codec.raw.codec", "RawCodec"),
}


class UnknownCodecError(LookupError):
    """No codec has this name."""


def names() -> tuple[str, ...]:
    """Names of all codecs."""
    return tuple(_CODECS)


def get(name: str) -> Codec:
    """Make the codec called `name`; raises UnknownCodecError, which lists the names there are."""
    if name not in _CODECS:
        raise UnknownCodecError(f"codec {name!r} is unknown; choose one of {', '.join(_CODECS)}")
    module, cls = _CODECS[name]
    codec: Codec = getattr(importlib.import_module(module), cls)()
    return codec
