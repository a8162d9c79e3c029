"""The codec `splitzip-progressive`: a code like that of `splitzip-channel` in two stages."""

import importlib
from typing import Any

import numpy as np
import torch

from codec.base import CodecError, Encoding, PagedBlock
from codec.progressive.payload import VERSION, parse_anchor, parse_rest
from codec.progressive.plan import Cut, Plans, anchor_plans
from codec.splitzip.formats import FORMATS


class ProgressiveCodec:
    """Levels below a top a channel, then the bits that they leave open: two stages, exact, on CPU and CUDA.

    cut: how fine the levels are; chunk: values of a tile at most. Made once; any thread may use it.
    """

    def __init__(self, cut: Cut | None = None, chunk: int = 4096) -> None:
        self.name = "splitzip-progressive"
        self.num_stages = 2
        self.exact = True
        self.dtypes = frozenset(FORMATS)
        self._cut = cut or Cut()
        self.parameters_id = VERSION << 16 | self._cut.keys << 8 | self._cut.values
        self._chunk = chunk

    def encode(self, pages: PagedBlock) -> Encoding:
        """Launch the encoding on the pages' device: on CUDA on its current stream, on a CPU at once.

        Raises CodecError where the element type is none of `dtypes`, or a pool's tensor is not contiguous.
        """
        encoding: Encoding = _kernels(pages.device).encode(pages, self._plans(pages))
        return encoding

    def decode(self, stage: int, payload: memoryview, out: PagedBlock) -> None:
        """Check all of a payload, then write it into `out`, on its device's current stream.

        Stage 0 gives every value its sign and the middle of its level. Stage 1 needs what stage 0 wrote, replaces the
        low mantissa bits and lowers the escapes' exponents; `out` may be read meanwhile.
        Raises CodecError, with `out` untouched, where the payload is not this stage of this codec, cut and spec.
        """
        source, plans = np.frombuffer(payload, dtype=np.uint8), self._plans(out)
        if stage == 0:
            _kernels(out.device).decode_anchor(source, parse_anchor(source, out.spec, plans), out)
        elif stage == 1:
            _kernels(out.device).refine(source, parse_rest(source, plans), out)
        else:
            raise CodecError(f"{self.name} has stages 0 and 1, not {stage}")

    def _plans(self, pages: PagedBlock) -> Plans:
        spec = pages.spec
        if spec.dtype not in self.dtypes:
            raise CodecError(f"{self.name} does not take dtype {spec.dtype}; it takes {', '.join(sorted(self.dtypes))}")
        return anchor_plans(spec, self._cut, self._chunk)


def _kernels(device: torch.device) -> Any:
    """What does the work on `device`: imported with the first page there, for numba and triton compile."""
    return importlib.import_module("codec.progressive.gpu" if device.type == "cuda" else "codec.progressive.cpu")
