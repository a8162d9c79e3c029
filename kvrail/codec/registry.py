"""Codecs by name. A codec's module, and torch with it, is imported when the codec is asked for, not before."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrail.codec.base import Codec
    from kvrail.codec.splitzip.one_stage.codebook import Codebook

# Where each codec is made, and whether it takes a codebook.
_CODECS = {
    "raw": ("kvrail.codec.raw.codec", "RawCodec", False),
    "splitzip": ("kvrail.codec.splitzip.one_stage.codec", "splitzip", True),
    "splitzip-channel": ("kvrail.codec.splitzip.one_stage.codec", "splitzip_channel", False),
    "splitzip-progressive": ("kvrail.codec.splitzip.progressive.codec", "ProgressiveCodec", False),
    "splitzip-progressive-ans": ("kvrail.codec.splitzip.progressive_ans.codec", "ProgressiveAnsCodec", False),
    "splitzip-ans": ("kvrail.codec.splitzip.entropy.codec", "AnsCodec", False),
    "int8": ("kvrail.codec.integer.codec", "int8", False),
    "int4": ("kvrail.codec.integer.codec", "int4", False),
    "lynx": ("kvrail.codec.lynx.codec", "lynx", False),
    "lynx-exact": ("kvrail.codec.lynx.codec", "lynx_exact", False),
}


_UNCOMPILED = {"cpu": frozenset({"raw", "int8", "int4"}), "cuda": frozenset({"int8", "int4"})}
"""By the kind of device: codecs that have no kernels of their own there."""

LOSSY = frozenset({"int8", "int4", "lynx"})
"""Codecs that do not restore every bit: what their `exact` says, for who has not imported them."""


class UnknownCodecError(LookupError):
    """No codec has this name."""


def names() -> tuple[str, ...]:
    """Names of all codecs that there are."""
    return tuple(_CODECS)


def compiles(name: str, device_kind: str) -> bool:
    """Whether the first use of a codec on "cpu" or "cuda" compiles kernels."""
    return name not in _UNCOMPILED[device_kind]


def get(name: str, codebook: "Codebook | None" = None) -> "Codec":
    """Make the codec called `name`; raises UnknownCodecError, which lists the names there are.

    codebook: for codecs that take one; without, they use the one that ships.
    """
    if name not in names():
        raise UnknownCodecError(f"codec {name!r} is unknown; choose one of {', '.join(names())}")
    module, maker, calibrated = _CODECS[name]
    make = getattr(importlib.import_module(module), maker)
    codec: Codec = make(codebook) if calibrated else make()
    return codec
