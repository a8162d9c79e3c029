"""The closed forms of pages that lose bits, by the bits of a value that attention knows them by."""

import torch

from kvrail.engine.kv.fixed import pages as fixed
from kvrail.engine.kv.fixed.pages import FixedPages
from kvrail.engine.kv.kvcomp import pages as kvcomp
from kvrail.engine.kv.kvcomp.form import CODED
from kvrail.engine.kv.kvcomp.pages import CodedPages
from kvrail.engine.kv.rotated import pages as rotated
from kvrail.engine.kv.rotated.form import ROTATED
from kvrail.engine.kv.rotated.pages import RotatedPages
from kvrail.values.layout import KVLayout

CODE_BITS = {"int8": 8, "int4": 4, "kvcomp": CODED, "rot3": ROTATED}
"""Bits of a value by a form's name: of a fixed width, or CODED, or ROTATED."""


def lossy_pages(layout: KVLayout, num_pages: int, bits: int, device: torch.device | str) -> FixedPages | CodedPages:
    """A pool of closed pages. Raises ConfigError where pages of `layout` have no such form."""
    if bits == CODED:
        return CodedPages(layout, num_pages, device)
    return (RotatedPages if bits == ROTATED else FixedPages)(layout, num_pages, bits, device)


def page_bytes(layout: KVLayout, bits: int) -> int:
    """Bytes of a closed page over all layers."""
    if bits == ROTATED:
        return rotated.page_bytes(layout)
    return kvcomp.page_bytes(layout) if bits == CODED else fixed.page_bytes(layout, bits)


def table_bytes(layout: KVLayout, bits: int) -> int:
    """Bytes that a pool takes beside its pages."""
    return kvcomp.table_bytes(layout) if bits == CODED else 0


def unsupported(layout: KVLayout, bits: int) -> str:
    """Why pages of `layout` have no such form; empty where they have one."""
    return kvcomp.unsupported(layout) if bits == CODED else fixed.unsupported(layout)
