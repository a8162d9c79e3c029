"""`splitzip-zstd` and `splitzip-ans`: the window code, its codes entropy-coded. README.md has the layout.

Wraps the codec of the window code and changes nothing of it: the inner payload is made and read by that codec, wherever
the pages lie; here it is cut into pieces, of which those that entropy coding makes smaller travel so. `splitzip-ans`
does all of it on the device where pages lie on CUDA.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

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
from kvrail.codec.core.backend import backend_of
from kvrail.codec.core.host import host_bytes
from kvrail.codec.splitzip.entropy.coder_zstd import ZstdCoder
from kvrail.codec.splitzip.entropy.payload import BODY, LENGTHS, pieces_of, places_of
from kvrail.codec.splitzip.one_stage.codec import WindowCodec
from kvrail.codec.splitzip.one_stage.payload import parse_header
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES

_PACKAGE = "kvrail.codec.splitzip.entropy"


class EntropyCoder(Protocol):
    """Byte strings to shorter ones and back, all of one payload in one call. Threads may share one.

    When a call ends, also in an error, nothing of its arguments is in use any more.
    """

    finds_repeats: bool  # whether strings that recur make a piece smaller, besides how often each byte occurs

    def compress(self, pieces: Sequence[Bytes]) -> list[Bytes]:
        """Each piece, none of them empty, coded by itself."""

    def decompress(self, coded: Sequence[Bytes], pieces: Sequence[Bytes]) -> None:
        """Fill each of `pieces` from its coded form; raises CodecError where that doesn't give exactly its bytes."""


def coded_pieces(coder: EntropyCoder, pieces: Sequence[Bytes], tried: Sequence[int]) -> list[Bytes]:
    """The pieces as they travel: those whose numbers are in `tried` coded, where that makes them smaller."""
    travelling, tried = list(pieces), [number for number in tried if pieces[number].size]
    for number, coded in zip(tried, coder.compress([pieces[number] for number in tried]), strict=True):
        if coded.size < pieces[number].size:
            travelling[number] = coded
    return travelling


def joined_pieces(header: bytes, pieces: Sequence[Bytes]) -> memoryview:
    """A payload of pieces as they travel, with their lengths behind its header."""
    head = np.frombuffer(header + LENGTHS.pack(*(piece.size for piece in pieces)), dtype=np.uint8)
    size = BODY + sum(piece.size for piece in pieces)
    memory = buffers.take(size)
    np.concatenate([head, *pieces], out=memory[:size])
    return memory.data[:size]


def restore_pieces(coder: EntropyCoder, came: Sequence[Bytes], pieces: Sequence[Bytes]) -> None:
    """Fill each of `pieces` from what came of it; raises CodecError where a coded one doesn't give its bytes."""
    smaller = []
    for source, target in zip(came, pieces, strict=True):
        if source.size < target.size:
            smaller.append((source, target))
        else:
            target[:] = source
    coder.decompress([source for source, _ in smaller], [target for _, target in smaller])


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
        pieces = coded_pieces(self.coder, [inner[piece] for piece in pieces_of(layout)], self.tried)
        return [joined_pieces(replace(layout, entropy_coded=True).header(), pieces)]

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
        self.reads_earlier_payloads = False
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
        check_dtype(self, out)
        inner = self._restore(host_bytes(self.name, payloads[0]), out.spec)
        self._inner.decode(0, [inner], out)

    def _restore(self, payload: Bytes, spec: BlockSpec) -> memoryview:
        """The inner payload, its lengths and header checked; the inner codec checks the rest."""
        layout = parse_header(payload, spec, self._code, 0, entropy_coded=True)
        places = pieces_of(layout)
        coded = [payload[piece] for piece in places_of(payload, payload.size, places)]
        inner = buffers.take(layout.size)
        inner[:HEADER_BYTES] = np.frombuffer(replace(layout, entropy_coded=False).header(), dtype=np.uint8)
        restore_pieces(self._coder, coded, [inner[place] for place in places])
        return inner.data[: layout.size]


class AnsCodec:
    """A window code with a top a channel, its codes coded by rANS: on CUDA without a way over the host."""

    def __init__(self, name: str, code: WindowCode) -> None:
        self.name = name
        self.num_stages = 1
        self.exact = True
        self.device_payloads = True
        self.reads_earlier_payloads = False
        self.dtypes = frozenset(FORMATS)
        self.parameters_id = 0
        self._code = code

    @functools.cached_property
    def _on_cpu(self) -> EntropyCodec:
        coder: EntropyCoder = backend_of(_PACKAGE, torch.device("cpu")).AnsCoder()
        return EntropyCodec(_inner(self.name, self._code), self._code, coder)

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the inner encoding on the pages' device; `stages` codes its payload, where that lies.

        Raises CodecError where the element type is none of `dtypes`, or a pool's tensor does not lie as the device
        takes it; ValueError where payloads are to stay `on_device` and the pages lie on a CPU.
        """
        check_place(self, pages, on_device)
        if pages.device.type != "cuda":
            return self._on_cpu.encode(pages)
        check_dtype(self, pages)
        encoding: Encoding = backend_of(_PACKAGE, pages.device).AnsEncoding(pages, self._code, on_device)
        return encoding

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Decode the one payload into `out`, on its device's current stream, which on CUDA is waited for.

        Raises CodecError, with `out` untouched, where the payload is not one of this codec and spec.
        """
        if out.device.type != "cuda":
            return self._on_cpu.decode(stage, payloads, out)
        check_stage(self, stage, payloads)
        check_dtype(self, out)
        backend_of(_PACKAGE, out.device).decode(payloads[0], self._code, out)


def check_dtype(codec: Codec, pages: PagedBlock) -> None:
    """Raise CodecError where a codec does not take the element type of `pages`."""
    dtype = pages.spec.dtype
    if dtype not in codec.dtypes:
        raise CodecError(f"{codec.name} does not take dtype {dtype}; it takes {', '.join(sorted(codec.dtypes))}")


def _inner(name: str, code: WindowCode) -> WindowCodec:
    return WindowCodec(name, dict.fromkeys(FORMATS, code), None)


def splitzip_zstd(chunk: int = 4096) -> EntropyCodec:
    """Sixteen exponents below the largest of each channel in each page, the codes coded by zstd."""
    code = WindowCode(4, per_channel=True, chunk=chunk)
    return EntropyCodec(_inner("splitzip-zstd", code), code, ZstdCoder())


def splitzip_ans(chunk: int = 4096) -> AnsCodec:
    """The same window, the codes coded by rANS."""
    return AnsCodec("splitzip-ans", WindowCode(4, per_channel=True, chunk=chunk))
