"""The codec `splitzip-ans`: the window code, its codes coded by rANS. README.md has the layout.

Encodes pages as the code in one stage does and cuts that payload into pieces. Pieces that rANS makes smaller travel
coded. On CUDA all of this runs on the device.
"""

from collections.abc import Sequence

from kvrail.codec.base import Encoding, PagedBlock, Payload
from kvrail.codec.core.backend import CheckedCodec, backend_of
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode

_PACKAGE = "kvrail.codec.splitzip.entropy"
_CODE = WindowCode(4, per_channel=True, chunk=4096)


class AnsCodec(CheckedCodec):
    """Sixteen exponents below the largest of each channel in each page, the codes coded by rANS; on CPU and CUDA.

    On CUDA `stages` of an encoding completes it, and decoding waits for the stream.
    """

    name = "splitzip-ans"
    dtypes = frozenset(FORMATS)
    device_payloads = True

    def _encode(self, pages: PagedBlock, on_device: bool) -> Encoding:
        backend = backend_of(_PACKAGE, pages.device)
        encoding: Encoding = (
            backend.AnsEncoding(pages, _CODE, on_device)
            if pages.device.type == "cuda"
            else backend.encode(pages, _CODE)
        )
        return encoding

    def _decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        backend_of(_PACKAGE, out.device).decode(payloads[0], _CODE, out)
