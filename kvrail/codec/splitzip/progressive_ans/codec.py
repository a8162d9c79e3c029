"""The codec `splitzip-progressive-ans`: `splitzip-ans` in two stages, the first without the low mantissa bits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrail.codec.base import PagedBlock, Payload
from kvrail.codec.core.backend import Backend, BackendCodec, backend_of
from kvrail.codec.core.host import host_bytes
from kvrail.codec.splitzip.progressive_ans.payload import StageLayout, parse_first, parse_rest
from kvrail.codec.splitzip.progressive_ans.plan import KEPT_BITS, Plans, cut_plans
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode

if TYPE_CHECKING:
    from kvrail.codec.splitzip.progressive_ans import cpu, gpu

    _BACKENDS: tuple[Backend[Plans, StageLayout], ...] = (cpu, gpu)


class ProgressiveAnsCodec(BackendCodec):
    """Exponents and the top of mantissas, entropy-coded, then the low mantissa bits: exact, on CPU and CUDA.

    kept: mantissa bits of keys and of values that the first stage shows, where elements have 16 bits; chunk: values of
    a tile at most. Raises ValueError where a number of bits is not in KEPT_BITS.
    """

    name = "splitzip-progressive-ans"
    package = "kvrail.codec.splitzip.progressive_ans"
    num_stages = 2
    dtypes = frozenset(FORMATS)

    def __init__(self, kept: tuple[int, int] = (3, 1), chunk: int = 4096) -> None:
        for bits in kept:
            if bits not in KEPT_BITS:
                known = f"{KEPT_BITS[0]} to {KEPT_BITS[-1]}"
                raise ValueError(f"the first stage shows {bits} mantissa bits; choose {known}")
        self.parameters_id = kept[0] << 8 | kept[1]
        self._kept = kept
        self._code = WindowCode(4, per_channel=True, chunk=chunk)

    def _decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Stage 0 gives every value its sign, its exponent and the middle of what its mantissa may be.

        On CUDA the stream is then waited for. Stage 1 replaces the low mantissa bits of what stage 0 left in `out`,
        which may be read meanwhile.
        """
        source, plans = host_bytes(self.name, payloads[-1]), self._coding(out)
        layout = parse_first(source, out.spec, plans) if stage == 0 else parse_rest(source, plans)
        backend_of(self.package, out.device).decode(stage, [source], [layout], plans, out)

    def _coding(self, pages: PagedBlock) -> Plans:
        return cut_plans(pages.spec, self._code, self._kept)
