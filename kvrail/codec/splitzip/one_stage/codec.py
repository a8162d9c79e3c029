"""The codecs `splitzip` and `splitzip-channel`: which code for which element type, and where the work is done."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvrail.codec.base import Codec, Encoding, PagedBlock, Payload, check_dtype, check_place, check_stage
from kvrail.codec.core.backend import Backend, backend_of
from kvrail.codec.core.host import host_bytes
from kvrail.codec.splitzip.one_stage.codebook import Codebook, default_codebook
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode
from kvrail.codec.splitzip.tiles.payload import Layout, parse
from kvrail.codec.splitzip.tiles.plan import plans_of

if TYPE_CHECKING:
    from kvrail.codec.splitzip.one_stage import cpu, gpu

    _BACKENDS: tuple[Backend[Coding, Layout], ...] = (cpu, gpu)


class WindowCodec(Codec):
    """A window code in one exact stage, on CPU and CUDA.

    codes: the code of each element type that it takes, all fixed or all per channel; codebook: the tops of a fixed
    code, else None.
    """

    def __init__(self, name: str, codes: dict[str, WindowCode], codebook: Codebook | None) -> None:
        self.name = name
        self.dtypes = frozenset(codes)
        self.parameters_id = 0 if codebook is None else codebook.id
        self._codes = codes
        self._codebook = codebook

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the encoding on the pages' device: on CUDA on its current stream, on a CPU at once.

        Raises CodecError where the element type is none of `dtypes`, a pool's tensor is not contiguous, or the codebook
        has no such layer; ValueError where payloads are to stay `on_device`.
        """
        check_place(self, pages, on_device)
        return _backend(pages.device).encode(pages, self._coding(pages))

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Check all of the one payload, then write it into `out`, on its device's current stream.

        Raises CodecError, with `out` untouched, where the payload is not one of this codec, parameters and spec.
        """
        check_stage(self, stage, payloads)
        source, coding = host_bytes(self.name, payloads[0]), self._coding(out)
        layout = parse(source, out.spec, coding.plans)
        _backend(out.device).decode(stage, [source], [layout], coding, out)

    def _coding(self, pages: PagedBlock) -> Coding:
        check_dtype(self, pages)
        dtype = pages.spec.dtype
        plans = plans_of(pages.spec, self._codes[dtype])
        if self._codebook is None:
            return Coding(plans, (None, None))
        tops = self._codebook.tops(dtype, "keys", pages.layers), self._codebook.tops(dtype, "values", pages.layers)
        return Coding(plans, tops)


def _backend(device: torch.device) -> Backend[Coding, Layout]:
    backend: Backend[Coding, Layout] = backend_of("kvrail.codec.splitzip.one_stage", device)
    return backend


def splitzip(codebook: Codebook | None = None, chunk: int = 4096) -> WindowCodec:
    """The code of the paper: 16 exponents, 8 for float8_e4m3fn; without a codebook, that which ships."""
    codes = {dtype: WindowCode(3 if dtype == "float8_e4m3fn" else 4, False, chunk) for dtype in FORMATS}
    return WindowCodec("splitzip", codes, codebook or default_codebook())


def splitzip_channel(chunk: int = 4096) -> WindowCodec:
    """Eight exponents below the largest of each channel in each page."""
    return WindowCodec("splitzip-channel", {dtype: WindowCode(3, True, chunk) for dtype in FORMATS}, None)
