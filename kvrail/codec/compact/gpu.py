"""Products with compact weights on an NVIDIA GPU, and the weights unpacked there."""

import ctypes

from kvrail.codec.compact.format import CompactWeight
from kvrail.codec.fused.builds import Form
from kvrail.codec.fused.weight import Products, product_op

FORM = Form("compact", (ctypes.c_void_p,) * 4)
"""For the launch of its kernels."""
_PRODUCTS = Products(FORM, ("blocks", "index", "counts", "scales"), ("blocks", "index", "counts", "shifts"))
multiply, prepare, unpack = _PRODUCTS.multiply, _PRODUCTS.prepare, _PRODUCTS.unpack
product = product_op("compact_product", CompactWeight, multiply)
