"""The codec `splitzip-ans`: the window code, its codes coded by rANS. README.md has the layout.

Encodes pages as the code in one stage does and cuts that payload into pieces. Pieces that rANS makes smaller travel
coded. On CUDA all of this runs on the device.
"""

from collections.abc import Sequence

from kvrail.codec.base import CodecError, Encoding, PagedBlock, Payload, check_place, check_stage
from kvrail.codec.core.backend import backend_of
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode

_PACKAGE = "kvrail.codec.splitzip.entropy"


class AnsCodec:
    """Sixteen exponents below the largest of each channel in each page, the codes coded by rANS; on CPU and CUDA.

    chunk: values of a tile at most. Made once; any thread may use it.
    """

    def __init__(self, chunk: int = 4096) -> None:
        self.name = "splitzip-ans"
        self.num_stages = 1
        self.exact = True
        self.device_payloads = True
        self.reads_earlier_payloads = False
        self.dtypes = frozenset(FORMATS)
        self.parameters_id = 0
        self._code = WindowCode(4, per_channel=True, chunk=chunk)

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the encoding on CUDA, on the current stream; `stages` completes it. On a CPU encode at once.

        Raises CodecError where the element type is none of `dtypes`, or a pool's tensor does not lie as the device
        takes it; ValueError where payloads are to stay `on_device` and the pages lie on a CPU.
        """
        check_place(self, pages, on_device)
        self._check_dtype(pages)
        backend = backend_of(_PACKAGE, pages.device)
        encoding: Encoding = (
            backend.AnsEncoding(pages, self._code, on_device)
            if pages.device.type == "cuda"
            else backend.encode(pages, self._code)
        )
        return encoding

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Decode the one payload into `out`, on its device's current stream, which on CUDA is waited for.

        Raises CodecError, with `out` untouched, where the payload is not one of this codec and spec.
        """
        check_stage(self, stage, payloads)
        self._check_dtype(out)
        backend_of(_PACKAGE, out.device).decode(payloads[0], self._code, out)

    def _check_dtype(self, pages: PagedBlock) -> None:
        dtype = pages.spec.dtype
        if dtype not in self.dtypes:
            raise CodecError(f"{self.name} does not take dtype {dtype}; it takes {', '.join(sorted(self.dtypes))}")
