"""Products with TCA-TBE weights on an NVIDIA GPU, and the weights decompressed there (ZipServ, section 4.4)."""

import ctypes

from kvrail.codec.fused.builds import Form
from kvrail.codec.fused.weight import Products, product_op
from kvrail.codec.papers.tbe.cpu import check
from kvrail.codec.papers.tbe.format import TbeWeight

_SCRATCH = 2208
"""SCRATCH_BYTES of gpu_kernels.cu; a block of `unpack` has eight warps, each with a tile of 2,048 bytes besides."""
FORM = Form("papers/tbe", (ctypes.c_void_p,) * 5, _SCRATCH, 8 * (2048 + _SCRATCH))
"""For the launch of its kernels."""


_PARTS = ("base", "bitmaps", "sign_mantissas", "full_values", "offsets")
_PRODUCTS = Products(FORM, _PARTS, _PARTS)
multiply, unpack = _PRODUCTS.multiply, _PRODUCTS.unpack
product = product_op("tbe_product", TbeWeight, multiply)


def prepare(weight: TbeWeight) -> None:
    """Check a weight, and compile and load what products with it need; nothing of it can be done during a capture.

    Raises CodecError where its parts do not fit each other: kernels read without looking.
    """
    check(weight)
    _PRODUCTS.prepare(weight)
