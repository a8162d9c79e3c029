"""The forms of closed pages, by the bits of a value that attention knows them by, and what a pair of tiles is."""

import functools

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.fixed import form as fixed
from kvrail.engine.kv.kvcomp.form import CODED, Pair, Part, reading_tables, stream_places
from kvrail.engine.kv.lossless import form as lossless
from kvrail.engine.kv.lossless.form import TOKENS, base_places, places, supports
from kvrail.engine.kv.rotated import form as rotated
from kvrail.engine.kv.rotated.form import KEY_BITS, ROTATED
from kvrail.values.layout import KVLayout

CODE_BITS = {"int8": 8, "int4": 4, "kvcomp": CODED, "rot3": ROTATED}
"""Bits of a value in the forms that lose some, by name: of a fixed width, or CODED, or ROTATED."""
FORMS = {"lossless": 0, **CODE_BITS}
"""Those of all forms; 0: no bit is lost."""
Tile = lossless.Tile | fixed.Tile | Part | rotated.Tile


def tiles(key_dim: int, value_dim: int, bits: int) -> tuple[Tile, Tile]:
    """The form of a tile of keys, and of one of values; of CODED ones, their parts."""
    if bits == CODED:
        return Pair(key_dim, value_dim).parts
    if not bits:
        return lossless.Tile(key_dim), lossless.Tile(value_dim)
    if bits == ROTATED:
        return fixed.Tile(key_dim, True, KEY_BITS), rotated.Tile(value_dim)
    return fixed.Tile(key_dim, True, bits), fixed.Tile(value_dim, False, bits)


def pair_bytes(key_dim: int, value_dim: int, bits: int) -> int:
    """Bytes of a tile of keys and one of values."""
    if bits == CODED:
        return Pair(key_dim, value_dim).bytes
    return sum(tile.bytes for tile in tiles(key_dim, value_dim, bits))


def page_bytes(layout: KVLayout, bits: int) -> int:
    """Bytes of a closed page over all layers, without spare units."""
    pairs = layout.num_layers * layout.num_kv_heads * (layout.page_size // TOKENS)
    return pairs * pair_bytes(layout.key_dim, layout.value_dim, bits)


def table_bytes(bits: int) -> int:
    """Bytes of the tables that attention reads beside pages."""
    return reading_tables().nbytes if bits == CODED else 0


def unsupported(layout: KVLayout, bits: int) -> str:
    """Why pages of `layout` have no such form; empty where they have one."""
    form = next(name for name, width in FORMS.items() if width == bits)
    for name, dim in (("keys", layout.key_dim), ("values", layout.value_dim)):
        if not supports(dim, layout.dtype):
            return f"{name} of {dim} {layout.dtype} a head have no {form} form: it is for bfloat16, multiples of 64"
    if layout.page_size % TOKENS:
        return f"page_size {layout.page_size}: {form} pages hold multiples of {TOKENS} tokens"
    return ""


@functools.cache
def orders(tile: Tile, keys: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """What kernels for CPUs take of a tile: the places of its values and of what rows or channels have, as stored."""
    if isinstance(tile, lossless.Tile):
        found = places(tile.dim, keys), base_places(tile.dim, keys)
    elif isinstance(tile, Part):
        found = stream_places(tile.dim, keys).reshape(-1), base_places(tile.rows, keys=True)
    elif isinstance(tile, rotated.Tile):
        found = rotated.code_places(tile.dim), rotated.channel_places(tile.dim)
    else:
        found = fixed.code_places(tile), fixed.row_places(tile)
    first, second = (np.ascontiguousarray(each, np.int32) for each in found)
    return first, second
