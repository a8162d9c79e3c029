"""The codec `splitzip-progressive`: a code like that of `splitzip-channel` in two stages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvrail.codec.base import CodecError, Encoding, PagedBlock, Payload, check_place, check_stage
from kvrail.codec.core.backend import Backend, backend_of
from kvrail.codec.core.host import host_bytes
from kvrail.codec.splitzip.progressive.format import Cut
from kvrail.codec.splitzip.progressive.payload import VERSION, StageLayout, parse_anchor, parse_both
from kvrail.codec.splitzip.progressive.plan import Plans, anchor_plans
from kvrail.codec.splitzip.tiles.format import FORMATS

if TYPE_CHECKING:
    from kvrail.codec.splitzip.progressive import cpu, gpu, reference

    _BACKENDS: tuple[Backend[Plans, StageLayout], ...] = (cpu, gpu, reference)


class ProgressiveCodec:
    """Levels below a top a channel, then the bits that they leave open: two stages, exact, on CPU and CUDA.

    cut: how fine the levels are; chunk: values of a tile at most. Made once; any thread may use it.
    """

    def __init__(self, cut: Cut | None = None, chunk: int = 4096) -> None:
        self.name = "splitzip-progressive"
        self.num_stages = 2
        self.exact = True
        self.device_payloads = False
        self.reads_earlier_payloads = True
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
        return _backend(pages.device).encode(pages, self._plans(pages))

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Check all of the payloads, then write their values into `out`, on its device's current stream.

        Stage 0 gives every value its sign and the middle of its level. Stage 1 writes the values from both payloads,
        whatever lies in `out`, but for scales and tensors that travel raw, which stage 0 left there; `out` may be read
        meanwhile. Raises CodecError, with `out` untouched, where a payload is not its stage of this codec, cut and
        spec, or the two are of different blocks.
        """
        check_stage(self, stage, payloads)
        sources, plans = [host_bytes(self.name, payload) for payload in payloads], self._plans(out)
        layouts: Sequence[StageLayout]
        if stage == 0:
            layouts = [parse_anchor(sources[0], out.spec, plans)]
        else:
            layouts = parse_both(sources[0], sources[1], out.spec, plans)
        _backend(out.device).decode(stage, sources, layouts, plans, out)

    def _plans(self, pages: PagedBlock) -> Plans:
        spec = pages.spec
        if spec.dtype not in self.dtypes:
            raise CodecError(f"{self.name} does not take dtype {spec.dtype}; it takes {', '.join(sorted(self.dtypes))}")
        return anchor_plans(spec, self._cut, self._chunk)


def _backend(device: torch.device) -> Backend[Plans, StageLayout]:
    backend: Backend[Plans, StageLayout] = backend_of("kvrail.codec.splitzip.progressive", device)
    return backend
