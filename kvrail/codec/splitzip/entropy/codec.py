"""The codec `splitzip-ans`: the window code, its codes coded by rANS. README.md has the layout.

Encodes pages as the code in one stage does and cuts that payload into pieces. Pieces that rANS makes smaller travel
coded. On CUDA all of this runs on the device.
"""

from collections.abc import Sequence

from kvrail.codec.base import Codec, Encoding, PagedBlock, Payload, check_dtype, check_place, check_stage
from kvrail.codec.core.backend import backend_of
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode

_PACKAGE = "kvrail.codec.splitzip.entropy"
_CODE = WindowCode(4, per_channel=True, chunk=4096)


class AnsCodec(Codec):
    """Sixteen exponents below the largest of each channel in each page, the codes coded by rANS; on CPU and CUDA."""

    name = "splitzip-ans"
    dtypes = frozenset(FORMATS)
    device_payloads = True

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the encoding on CUDA, on the current stream; `stages` completes it. On a CPU encode at once.

        Raises CodecError where the element type is none of `dtypes`, or a pool's tensor does not lie as the device
        takes it; ValueError where payloads are to stay `on_device` and the pages lie on a CPU.
        """
        check_place(self, pages, on_device)
        check_dtype(self, pages)
        backend = backend_of(_PACKAGE, pages.device)
        encoding: Encoding = (
            backend.AnsEncoding(pages, _CODE, on_device)
            if pages.device.type == "cuda"
            else backend.encode(pages, _CODE)
        )
        return encoding

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Decode the one payload into `out`, on its device's current stream, which on CUDA is waited for.

        Raises CodecError, with `out` untouched, where the payload is not one of this codec and spec.
        """
        check_stage(self, stage, payloads)
        check_dtype(self, out)
        backend_of(_PACKAGE, out.device).decode(payloads[0], _CODE, out)
