"""The codec `splitzip-progressive`: a code like that of `splitzip-channel` in two stages."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from kvrail.codec.base import CodecError, Encoding, PagedBlock, Payload, check_place, check_stage
from kvrail.codec.core.host import host_bytes
from kvrail.codec.progressive.payload import VERSION, parse_anchor, parse_both
from kvrail.codec.progressive.plan import Cut, Plans, anchor_plans
from kvrail.codec.splitzip.formats import FORMATS


class ProgressiveCodec:
    """Levels below a top a channel, then the bits that they leave open: two stages, exact, on CPU and CUDA.

    cut: how fine the levels are; chunk: values of a tile at most. Made once; any thread may use it.
    """

    def __init__(self, cut: Cut | None = None, chunk: int = 4096) -> None:
        self.name = "splitzip-progressive"
        self.num_stages = 2
        self.exact = True
        self.device_payloads = False
        self.dtypes = frozenset(FORMATS)
        self._cut = cut or Cut()
        self.parameters_id = VERSION << 16 | self._cut.keys << 8 | self._cut.values
        self._chunk = chunk

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the encoding on the pages' device: on CUDA on its current stream, on a CPU at once.

        Raises CodecError where the element type is none of `dtypes`, or a pool's tensor is not contiguous; ValueError
        where payloads are to stay `on_device`.
        """
        check_place(self, pages, on_device)
        encoding: Encoding = _kernels(pages.device).encode(pages, self._plans(pages))
        return encoding

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Check all of the payloads, then write their values into `out`, on its device's current stream.

        Stage 0 gives every value its sign and the middle of its level. Stage 1 writes the values from both payloads,
        whatever lies in `out`, but for scales and tensors that travel raw, which stage 0 left there; `out` may be read
        meanwhile. Raises CodecError, with `out` untouched, where a payload is not its stage of this codec, cut and
        spec, or the two are of different blocks.
        """
        check_stage(self, stage, payloads)
        first, *later = (host_bytes(self.name, payload) for payload in payloads)
        plans = self._plans(out)
        if later:
            (second,) = later
            layouts = parse_both(first, second, out.spec, plans)
            _kernels(out.device).decode_exact((first, second), layouts, out)
        else:
            _kernels(out.device).decode_anchor(first, parse_anchor(first, out.spec, plans), out)

    def _plans(self, pages: PagedBlock) -> Plans:
        spec = pages.spec
        if spec.dtype not in self.dtypes:
            raise CodecError(f"{self.name} does not take dtype {spec.dtype}; it takes {', '.join(sorted(self.dtypes))}")
        return anchor_plans(spec, self._cut, self._chunk)


def _kernels(device: torch.device) -> Any:
    """What does the work on `device`: imported with the first page there, for numba and triton compile."""
    return importlib.import_module(f"kvrail.codec.progressive.{'gpu' if device.type == 'cuda' else 'cpu'}")
