"""The codecs `lynx` and `lynx-exact`, and where the work is done."""

import importlib
from typing import Any

import numpy as np
import torch

from codec.base import CodecError, Encoding, PagedBlock
from codec.lynx.formats import FORMATS, LynxCode
from codec.lynx.payload import EXACT, parse, plans_of


class LynxCodec:
    """Anchors, residuals and, where exact, what restores every bit; on CPU and CUDA.

    Every stage but the first refines what the one before left in the pages: nothing is kept between stages. Made once;
    any thread may use it.
    """

    def __init__(self, name: str, code: LynxCode, *, exact: bool) -> None:
        self.name = name
        self.num_stages = EXACT + 1 if exact else EXACT
        self.exact = exact
        self.dtypes = frozenset(FORMATS)
        self.parameters_id = code.id
        self._code = code

    def encode(self, pages: PagedBlock) -> Encoding:
        """Launch the encoding on the pages' device: on CUDA on its current stream, on a CPU at once.

        Raises CodecError where the element type is none of `dtypes` or a pool's tensor is not contiguous.
        """
        self._check_dtype(pages)
        plans = plans_of(pages.spec, self._code)
        encoding: Encoding = _kernels(pages.device).encode(pages, plans, self.num_stages)
        return encoding

    def decode(self, stage: int, payload: memoryview, out: PagedBlock) -> None:
        """Check all of a payload, then write its stage into `out`, on its device's current stream.

        Later stages need what the one before left in the pages. Raises CodecError, with `out` untouched, where the
        payload is not one of this codec, parameters, spec and stage.
        """
        if not 0 <= stage < self.num_stages:
            raise CodecError(f"{self.name} has stages 0 to {self.num_stages - 1}, not {stage}")
        self._check_dtype(out)
        source = np.frombuffer(payload, dtype=np.uint8)
        layout = parse(source, out.spec, self._code, stage)
        _kernels(out.device).decode(source, layout, out)

    def _check_dtype(self, pages: PagedBlock) -> None:
        dtype = pages.spec.dtype
        if dtype not in self.dtypes:
            raise CodecError(f"{self.name} does not take dtype {dtype}; it takes {', '.join(sorted(self.dtypes))}")


def _kernels(device: torch.device) -> Any:
    """What does the work on `device`: imported with the first page there, for numba and triton compile."""
    return importlib.import_module("codec.lynx.gpu" if device.type == "cuda" else "codec.lynx.cpu")


def lynx(code: LynxCode | None = None) -> LynxCodec:
    """Two stages of four bits a value; the last is of the class of INT8."""
    return LynxCodec("lynx", code or LynxCode(), exact=False)


def lynx_exact(code: LynxCode | None = None) -> LynxCodec:
    """The stages of `lynx` and one that restores every bit."""
    return LynxCodec("lynx-exact", code or LynxCode(), exact=True)
