"""The codecs `splitzip` and `splitzip-channel`: which code for which element type, and where the work is done."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrail.codec.base import PagedBlock, Payload
from kvrail.codec.core.backend import Backend, BackendCodec, backend_of
from kvrail.codec.core.host import host_bytes
from kvrail.codec.splitzip.one_stage.codebook import Codebook, default_codebook
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode
from kvrail.codec.splitzip.tiles.payload import Layout, parse
from kvrail.codec.splitzip.tiles.plan import plans_of

if TYPE_CHECKING:
    from kvrail.codec.splitzip.one_stage import cpu, gpu

    _BACKENDS: tuple[Backend[Coding, Layout], ...] = (cpu, gpu)


class WindowCodec(BackendCodec):
    """A window code in one exact stage, on CPU and CUDA.

    codes: the code of each element type that it takes, all fixed or all per channel; codebook: the tops of a fixed
    code, else None.
    """

    package = "kvrail.codec.splitzip.one_stage"

    def __init__(self, name: str, codes: dict[str, WindowCode], codebook: Codebook | None) -> None:
        self.name = name
        self.dtypes = frozenset(codes)
        self.parameters_id = 0 if codebook is None else codebook.id
        self._codes = codes
        self._codebook = codebook

    def _decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        source, coding = host_bytes(self.name, payloads[0]), self._coding(out)
        layout = parse(source, out.spec, coding.plans)
        backend_of(self.package, out.device).decode(stage, [source], [layout], coding, out)

    def _coding(self, pages: PagedBlock) -> Coding:
        dtype = pages.spec.dtype
        plans = plans_of(pages.spec, self._codes[dtype])
        if self._codebook is None:
            return Coding(plans)
        tops = self._codebook.tops(dtype, "keys", pages.layers), self._codebook.tops(dtype, "values", pages.layers)
        return Coding(plans, tops)


def splitzip(codebook: Codebook | None = None, chunk: int = 4096) -> WindowCodec:
    """The code of the paper: 16 exponents, 8 for float8_e4m3fn; without a codebook, that which ships."""
    codes = {dtype: WindowCode(3 if dtype == "float8_e4m3fn" else 4, False, chunk) for dtype in FORMATS}
    return WindowCodec("splitzip", codes, codebook or default_codebook())


def splitzip_channel(chunk: int = 4096) -> WindowCodec:
    """Eight exponents below the largest of each channel in each page."""
    return WindowCodec("splitzip-channel", {dtype: WindowCode(3, True, chunk) for dtype in FORMATS}, None)
