"""The Triton kernel that launches call: keys and values in one grid. gpu_page_kernels.py has what a program does."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.papers.lynx.gpu_page_kernels import decode_block, encode_block


@triton.jit(
    do_not_specialize=[
        "key_layer_stride",
        "value_layer_stride",
        "key_page_stride",
        "value_page_stride",
        "num_pages",
        "pages",
        "key_programs",
    ]
)
def pages_kernel(
    keys,
    values,
    key_layer_stride: tl.int64,
    value_layer_stride: tl.int64,
    key_page_stride: tl.int64,
    value_page_stride: tl.int64,
    table,
    num_pages,
    pages,
    key_programs,
    key_anchors,
    value_anchors,
    key_residuals,
    value_residuals,
    tables,
    ENCODES: tl.constexpr,
    STAGE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Grid: blocks of columns of the keys' pages, then of the values'.

    keys, values: uint8, the pools; strides: bytes; table: int64 [num_pages], page ids; pages: of all layers; anchors,
    residuals: uint8, fixed sections; tables: float32 [33], edges, middles, steps and rates of the code. ENCODES: from
    pages to both stages. Else back: STAGE 0 writes what anchors stand for and reads nothing else, 1 what both do.
    """
    program = tl.program_id(0)
    if program < key_programs:
        if ENCODES:
            encode_block(
                program, keys, key_layer_stride, key_page_stride, table, num_pages, pages, key_anchors, key_residuals,
                tables, KEYS,
            )  # fmt: skip
        else:
            decode_block(
                program, keys, key_layer_stride, key_page_stride, table, num_pages, pages, key_anchors, key_residuals,
                tables, STAGE, KEYS,
            )  # fmt: skip
    elif ENCODES:
        encode_block(
            program - key_programs, values, value_layer_stride, value_page_stride, table, num_pages, pages,
            value_anchors, value_residuals, tables, VALUES,
        )  # fmt: skip
    else:
        decode_block(
            program - key_programs, values, value_layer_stride, value_page_stride, table, num_pages, pages,
            value_anchors, value_residuals, tables, STAGE, VALUES,
        )  # fmt: skip
