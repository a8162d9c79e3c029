"""The Triton kernel that launches call: tiles of keys and values in one grid, encoded or decoded.

gpu_encode_kernel.py and gpu_decode_kernel.py have what a program does.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.splitzip.one_stage.gpu_decode_kernel import decode_tile
from kvrail.codec.splitzip.one_stage.gpu_encode_kernel import encode_tile
from kvrail.codec.splitzip.tiles.gpu_tile_kernels import RUNTIME


@triton.jit(do_not_specialize=RUNTIME)
def tiles_kernel(
    keys,
    values,
    key_layer_stride: tl.int64,
    value_layer_stride: tl.int64,
    key_page_stride: tl.int64,
    value_page_stride: tl.int64,
    table,
    num_pages,
    num_layers,
    key_tiles,
    value_tiles,
    key_dense,
    value_dense,
    key_records,
    value_records,
    key_extensions,
    value_extensions,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ENCODES: tl.constexpr,
):
    """Grid: key tiles, then value tiles. ENCODES: from pages to dense parts and escapes; else back.

    keys, values: uint8, the pools; strides: bytes; table: int64 [num_pages + 2 * num_layers], page ids, then tops of
    keys and of values, which are not read where HALVES is 2; dense: uint8, dense parts, all but the group offsets where
    it encodes. Records uint16 and extensions uint8: where it encodes, a slot a tile, with room for as many as a tile
    has values; else those of a tensor's tiles, in order. Every record must lie on a value.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        if ENCODES:
            encode_tile(
                tile, key_tiles, keys, key_layer_stride, key_page_stride, table, table + num_pages, num_pages,
                key_dense, key_records, key_extensions, KEYS,
            )  # fmt: skip
        else:
            decode_tile(
                tile, key_tiles, keys, key_layer_stride, key_page_stride, table, table + num_pages, num_pages,
                key_dense, key_records, key_extensions, KEYS,
            )  # fmt: skip
    elif ENCODES:
        encode_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, table,
            table + num_pages + num_layers, num_pages, value_dense, value_records, value_extensions, VALUES,
        )  # fmt: skip
    else:
        decode_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, table,
            table + num_pages + num_layers, num_pages, value_dense, value_records, value_extensions, VALUES,
        )  # fmt: skip
