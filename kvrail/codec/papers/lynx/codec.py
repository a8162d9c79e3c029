"""The codecs `lynx` and `lynx-exact`, and where the work is done."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrail.codec.base import PagedBlock, Payload
from kvrail.codec.core.backend import Backend, BackendCodec, backend_of
from kvrail.codec.core.floats import WIDE
from kvrail.codec.core.host import host_bytes
from kvrail.codec.papers.lynx.format import LynxCode
from kvrail.codec.papers.lynx.payload import ANCHOR, EXACT, RESIDUAL, Layout, parse, parse_both, plans_of
from kvrail.codec.papers.lynx.plan import Coding

if TYPE_CHECKING:
    from kvrail.codec.papers.lynx import cpu, gpu

    _BACKENDS: tuple[Backend[Coding, Layout], ...] = (cpu, gpu)


class LynxCodec(BackendCodec):
    """Anchors, residuals and, where exact, what restores every bit; on CPU and CUDA."""

    package = "kvrail.codec.papers.lynx"
    dtypes = frozenset(WIDE)
    reads_earlier_payloads = True

    def __init__(self, name: str, code: LynxCode, *, exact: bool) -> None:
        self.name = name
        self.num_stages = EXACT + 1 if exact else EXACT
        self.exact = exact
        self.parameters_id = code.id
        self._code = code

    def _decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """RESIDUAL is written from the first two, which must be of one block, whatever lies in `out`.

        Only tensors that travel raw are what ANCHOR left there. EXACT corrects by its own payload what RESIDUAL left.
        """
        sources = [host_bytes(self.name, payload) for payload in payloads]
        layouts: Sequence[Layout]
        if stage == RESIDUAL:
            layouts = parse_both(sources[ANCHOR], sources[RESIDUAL], out.spec, self._code)
        else:
            sources = sources[-1:]
            layouts = [parse(sources[0], out.spec, self._code, stage)]
        backend_of(self.package, out.device).decode(stage, sources, layouts, self._coding(out), out)

    def _coding(self, pages: PagedBlock) -> Coding:
        return Coding(plans_of(pages.spec, self._code), self.num_stages)


def lynx(code: LynxCode | None = None) -> LynxCodec:
    """Two stages of four bits a value; the last is of the class of INT8."""
    return LynxCodec("lynx", code or LynxCode(), exact=False)


def lynx_exact(code: LynxCode | None = None) -> LynxCodec:
    """The stages of `lynx` and one that restores every bit."""
    return LynxCodec("lynx-exact", code or LynxCode(), exact=True)
