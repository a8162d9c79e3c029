"""Codecs of KV pages by name. What a codec says of itself here is known before its module, and torch, is imported.

A codec is a folder and one `register` line below. Another package adds one by an entry point of the group
"kvrail.codecs" that names a CodecInfo, in a module that imports no torch:

    [project.entry-points."kvrail.codecs"]
    mine = "my_package.kvrail:MINE"

    MINE = CodecInfo("mine", "my_package.codec:MyCodec")
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrail.codec.base import Codec
    from kvrail.codec.splitzip.one_stage.codebook import Codebook

GROUP = "kvrail.codecs"
"""Group of the entry points of other packages."""
DEVICES = frozenset({"cpu", "cuda"})


class UnknownCodecError(LookupError):
    """No codec has this name."""


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """What is known of a codec without importing it.

    make: "module:attribute", called without arguments, or with a codebook (or None) where `takes_codebook`. exact:
    whether its last stage restores every bit. compiles_on: kinds of device, of DEVICES, where its first use compiles
    kernels. auto: whether codec `auto` may choose it, and workers compile it before requests ask for it.
    """

    name: str
    make: str
    exact: bool = True
    compiles_on: frozenset[str] = DEVICES
    auto: bool = False
    takes_codebook: bool = False


_codecs: dict[str, CodecInfo] = {}


def register(info: CodecInfo) -> None:
    """Add a codec. Raises ValueError where another one has its name."""
    if _codecs.setdefault(info.name, info) != info:
        raise ValueError(f"two codecs are called {info.name!r}: {_codecs[info.name].make} and {info.make}")


_NOWHERE: frozenset[str] = frozenset()
_ONE_STAGE = "kvrail.codec.splitzip.one_stage.codec"
_PROGRESSIVE_ANS = "kvrail.codec.splitzip.progressive_ans.codec:ProgressiveAnsCodec"
register(CodecInfo("raw", "kvrail.codec.raw.codec:RawCodec", auto=True, compiles_on=frozenset({"cuda"})))
register(CodecInfo("splitzip-channel", f"{_ONE_STAGE}:splitzip_channel", auto=True))
register(CodecInfo("splitzip-ans", "kvrail.codec.splitzip.entropy.codec:AnsCodec", auto=True))
register(CodecInfo("splitzip-progressive-ans", _PROGRESSIVE_ANS, auto=True))
register(CodecInfo("int8", "kvrail.codec.integer.codec:int8", exact=False, compiles_on=_NOWHERE))
register(CodecInfo("int4", "kvrail.codec.integer.codec:int4", exact=False, compiles_on=_NOWHERE))
register(CodecInfo("splitzip", f"{_ONE_STAGE}:splitzip", takes_codebook=True))
register(CodecInfo("lynx", "kvrail.codec.papers.lynx.codec:lynx", exact=False))
register(CodecInfo("lynx-exact", "kvrail.codec.papers.lynx.codec:lynx_exact"))
register(CodecInfo("kvcomp", "kvrail.codec.papers.kvcomp.codec:kvcomp", exact=False))
register(CodecInfo("kvcomp-block", "kvrail.codec.papers.kvcomp.codec:kvcomp_block", exact=False))


@functools.cache
def _load_entry_points() -> None:
    """Register what other packages offer; once. Raises ValueError where an entry point is no CodecInfo of its name."""
    for entry in entry_points(group=GROUP):
        try:
            info = entry.load()
        except (ImportError, AttributeError) as error:
            line = f"{entry.name} = {entry.value}"
            raise ValueError(f"entry point {line} of {GROUP} does not load: {error}; repair its package") from error
        if not isinstance(info, CodecInfo) or info.name != entry.name:
            raise ValueError(f"entry point {entry.name} = {entry.value} of {GROUP} is {info!r}, no CodecInfo so called")
        register(info)


def names() -> tuple[str, ...]:
    """Names of all codecs that there are."""
    _load_entry_points()
    return tuple(_codecs)


def info(name: str) -> CodecInfo:
    """What is known of the codec called `name`; raises UnknownCodecError, which lists the names there are."""
    if name not in _codecs and name not in names():  # codecs of this package do not depend on what others offer
        raise UnknownCodecError(f"codec {name!r} is unknown; choose one of {', '.join(names())}")
    return _codecs[name]


def get(name: str, codebook: "Codebook | None" = None) -> "Codec":
    """Make the codec called `name`; raises UnknownCodecError, which lists the names there are.

    codebook: for codecs that take one; without, they use the one that ships.
    """
    found = info(name)
    module, _, attribute = found.make.partition(":")
    make: Callable[..., Codec] = getattr(importlib.import_module(module), attribute)
    return make(codebook) if found.takes_codebook else make()
