"""The codecs `splitzip` and `splitzip-channel`: which code for which element type, and where the work is done."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from kvrail.codec.base import CodecError, Encoding, PagedBlock, Payload, check_place, check_stage
from kvrail.codec.core.arrays import Ints
from kvrail.codec.core.host import host_bytes
from kvrail.codec.splitzip.codebook import Codebook, default_codebook
from kvrail.codec.splitzip.formats import FORMATS, WindowCode
from kvrail.codec.splitzip.payload import parse, plans_of


class WindowCodec:
    """A window code in one exact stage, on CPU and CUDA.

    codes: the code of each element type that it takes, all fixed or all per channel; codebook: the tops of a fixed
    code, else None. Made once; any thread may use it.
    """

    def __init__(self, name: str, codes: dict[str, WindowCode], codebook: Codebook | None) -> None:
        self.name = name
        self.num_stages = 1
        self.exact = True
        self.device_payloads = False
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
        plans, tops = plans_of(pages.spec, self._code(pages)), self._tops(pages)
        encoding: Encoding = _kernels(pages.device).encode(pages, plans, tops, self.parameters_id)
        return encoding

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Check all of the one payload, then write it into `out`, on its device's current stream.

        Raises CodecError, with `out` untouched, where the payload is not one of this codec, parameters and spec.
        """
        check_stage(self, stage, payloads)
        source, tops = host_bytes(self.name, payloads[0]), self._tops(out)
        layout = parse(source, out.spec, self._code(out), self.parameters_id)
        _kernels(out.device).decode(source, layout, tops, out)

    def _code(self, pages: PagedBlock) -> WindowCode:
        dtype = pages.spec.dtype
        if dtype not in self._codes:
            raise CodecError(f"{self.name} does not take dtype {dtype}; it takes {', '.join(sorted(self._codes))}")
        return self._codes[dtype]

    def _tops(self, pages: PagedBlock) -> tuple[Ints | None, Ints | None]:
        """Tops of keys and values by layer, or None where channels have their own."""
        if self._codebook is None:
            return None, None
        dtype = pages.spec.dtype
        return self._codebook.tops(dtype, "keys", pages.layers), self._codebook.tops(dtype, "values", pages.layers)


def _kernels(device: torch.device) -> Any:
    """What does the work on `device`: imported with the first page there, for numba and triton compile."""
    return importlib.import_module(f"kvrail.codec.splitzip.{'gpu' if device.type == 'cuda' else 'cpu'}")


def splitzip(codebook: Codebook | None = None, chunk: int = 4096) -> WindowCodec:
    """The code of the paper: 16 exponents, 8 for float8_e4m3fn; without a codebook, that which ships."""
    codes = {dtype: WindowCode(3 if dtype == "float8_e4m3fn" else 4, False, chunk) for dtype in FORMATS}
    return WindowCodec("splitzip", codes, codebook or default_codebook())


def splitzip_channel(chunk: int = 4096) -> WindowCodec:
    """Eight exponents below the largest of each channel in each page."""
    return WindowCodec("splitzip-channel", {dtype: WindowCode(3, True, chunk) for dtype in FORMATS}, None)
