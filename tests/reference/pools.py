"""Pages as the references read and write them."""

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.arrays import Bits
from kvrail.codec.core.cpu import byte_pools


def matrices(pages: PagedBlock) -> list[Bits]:
    """The pool's tensors, cut to the layers chosen, as unsigned integers [layers, pool pages, rows, columns]; views.

    Raises CodecError where one is not contiguous.
    """
    pools = zip(byte_pools(pages), pages.layer_pools(), strict=True)
    return [whole.view(f"u{pool.element_size()}").reshape(*pool.shape[:3], -1) for whole, pool in pools]
