"""`splitzip-zstd` and `splitzip-ans`: the window code, its codes entropy-coded. README.md has the layout.

Wraps the codec of the window code and changes nothing of it: the inner payload is made and read by that codec, wherever
the pages lie; here it is cut into pieces, of which those that entropy coding makes smaller travel so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvrail.codec.base import (
    BlockSpec,
    Codec,
    CodecError,
    Encoding,
    EncodingStats,
    PagedBlock,
    Payload,
    check_place,
    check_stage,
)
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.host import host_bytes
from kvrail.codec.splitzip.entropy.coder_ans import AnsCoder
from kvrail.codec.splitzip.entropy.coder_zstd import ZstdCoder
from kvrail.codec.splitzip.entropy.payload import BODY, LENGTHS, cut, pieces_of
from kvrail.codec.splitzip.one_stage.codec import WindowCodec
from kvrail.codec.splitzip.one_stage.payload import parse_header
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES


class EntropyCoder(Protocol):
    """Byte strings to shorter ones and back, all of one payload in one call. Threads may share one.

    When a call ends, also in an error, nothing of its arguments is in use any more.
    """

    finds_repeats: bool  # whether strings that recur make a piece smaller, besides how often each byte occurs

    def compress(self, pieces: Sequence[Bytes]) -> list[Bytes]:
        """Each piece, none of them empty, coded by itself."""

    def decompress(self, coded: Sequence[Bytes], pieces: Sequence[Bytes]) -> None:
        """Fill each of `pieces` from its coded form; raises CodecError where that doesn't give exactly its bytes."""


@dataclass(frozen=True, slots=True)
class _EntropyEncoding:
    """An inner encoding whose payload will be coded. tried: numbers of the pieces that are worth a try."""

    inner: Encoding
    spec: BlockSpec
    code: WindowCode
    coder: EntropyCoder
    tried: tuple[int, ...]

    def stages(self) -> list[Payload]:
        """Wait for the inner payload and code it."""
        inner = host_bytes("entropy coding", self.inner.stages()[0])
        layout = parse_header(inner, self.spec, self.code, 0, entropy_coded=False)
        pieces = [inner[piece] for piece in pieces_of(layout)]
        tried = [number for number in self.tried if pieces[number].size]
        for number, coded in zip(tried, self.coder.compress([pieces[number] for number in tried]), strict=True):
            if coded.size < pieces[number].size:
                pieces[number] = coded
        header = replace(layout, entropy_coded=True).header() + LENGTHS.pack(*(piece.size for piece in pieces))
        size = BODY + sum(piece.size for piece in pieces)
        memory = buffers.take(size)
        np.concatenate([np.frombuffer(header, dtype=np.uint8), *pieces], out=memory[:size])
        return [memory.data[:size]]

    def stats(self) -> EncodingStats:
        """Those of the inner encoding."""
        return self.inner.stats()


class EntropyCodec:
    """A window code with a top a channel, entropy-coded.

    inner: the codec of `code` for every element type that it takes, by the name that this one shall have.
    """

    def __init__(self, inner: Codec, code: WindowCode, coder: EntropyCoder) -> None:
        self.name = inner.name
        self.num_stages = 1
        self.exact = True
        self.device_payloads = False
        self.dtypes = inner.dtypes
        self.parameters_id = inner.parameters_id
        self._inner = inner
        self._code = code
        self._coder = coder

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the inner encoding on the pages' device; `stages` codes its payload.

        Significands are not worth a try but for the values of layer 0: these depend on the token alone, so that a
        token that recurs repeats its row. Raises ValueError where payloads are to stay `on_device`.
        """
        check_place(self, pages, on_device)
        tried = (1, 2, 3, 4) if pages.layers.start == 0 and self._coder.finds_repeats else (1, 3, 4)
        return _EntropyEncoding(self._inner.encode(pages), pages.spec, self._code, self._coder, tried)

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Restore the inner of the one payload on the host, then decode it into `out`, on its device's current stream.

        Raises CodecError, with `out` untouched, where the payload is not one of this codec and spec.
        """
        check_stage(self, stage, payloads)
        if out.spec.dtype not in self.dtypes:
            known = ", ".join(sorted(self.dtypes))
            raise CodecError(f"{self.name} does not take dtype {out.spec.dtype}; it takes {known}")
        inner = self._restore(host_bytes(self.name, payloads[0]), out.spec)
        self._inner.decode(0, [inner], out)

    def _restore(self, payload: Bytes, spec: BlockSpec) -> memoryview:
        """The inner payload, its lengths and header checked; the inner codec checks the rest."""
        layout = parse_header(payload, spec, self._code, 0, entropy_coded=True)
        places = pieces_of(layout)
        coded = cut(payload, layout, places)
        inner = buffers.take(layout.size)
        inner[:HEADER_BYTES] = np.frombuffer(replace(layout, entropy_coded=False).header(), dtype=np.uint8)
        smaller = []
        for source, place in zip(coded, places, strict=True):
            target = inner[place]
            if source.size < target.size:
                smaller.append((source, target))
            else:
                target[:] = source
        self._coder.decompress([source for source, _ in smaller], [target for _, target in smaller])
        return inner.data[: layout.size]


def splitzip_zstd(chunk: int = 4096) -> EntropyCodec:
    """Sixteen exponents below the largest of each channel in each page, the codes coded by zstd."""
    return _entropy_codec("splitzip-zstd", ZstdCoder(), chunk)


def splitzip_ans(chunk: int = 4096) -> EntropyCodec:
    """The same window, the codes coded by nvCOMP's ANS on the CUDA device."""
    return _entropy_codec("splitzip-ans", AnsCoder(), chunk)


def _entropy_codec(name: str, coder: EntropyCoder, chunk: int) -> EntropyCodec:
    code = WindowCode(4, per_channel=True, chunk=chunk)
    return EntropyCodec(WindowCodec(name, dict.fromkeys(FORMATS, code), None), code, coder)
