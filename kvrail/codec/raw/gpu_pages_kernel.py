"""Triton kernel of `raw`: whole pages between a pool and one contiguous buffer, whichever way."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _move(block, pool, first_layer, layer_stride, page_stride, buffer, table, num_pages, WORDS: tl.constexpr,
          BLOCK: tl.constexpr, GATHER: tl.constexpr):  # fmt: skip
    """One block of one page of one tensor; block: its number among the tensor's, page by page, layer by layer."""
    BLOCKS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    number = block // BLOCKS  # of the page, layer by layer
    layer, place = number // num_pages, number % num_pages
    where = (block % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    real = where < WORDS
    page = pool + (first_layer + layer).to(tl.int64) * layer_stride + tl.load(table + place) * page_stride
    part = buffer + number.to(tl.int64) * WORDS
    if GATHER:
        tl.store(part + where, tl.load(page + where, mask=real), mask=real)
    else:
        tl.store(page + where, tl.load(part + where, mask=real), mask=real)


@triton.jit(do_not_specialize=["first_layer", "first_start", "second_start", "num_pages", "first_blocks"])
def move_pages_kernel(
    first_pool,
    second_pool,
    first_layer,
    first_layer_stride: tl.int64,
    second_layer_stride: tl.int64,
    first_page_stride: tl.int64,
    second_page_stride: tl.int64,
    buffer,
    first_start: tl.int64,
    second_start: tl.int64,
    table,
    num_pages,
    first_blocks,
    FIRST_WORDS: tl.constexpr,
    SECOND_WORDS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Grid: `first_blocks` blocks of the first tensor, then those of the second.

    Pools and buffer: words of one size; strides and starts in words; a page has WORDS of them, contiguous. The tensors'
    parts of the buffer begin at their starts. table: int64 [num_pages], page ids. GATHER: from pools to the buffer,
    else back.
    """
    block = tl.program_id(0)
    if block < first_blocks:
        _move(block, first_pool, first_layer, first_layer_stride, first_page_stride, buffer + first_start, table,
              num_pages, FIRST_WORDS, FIRST_BLOCK, GATHER)  # fmt: skip
    else:
        _move(block - first_blocks, second_pool, first_layer, second_layer_stride, second_page_stride,
              buffer + second_start, table, num_pages, SECOND_WORDS, SECOND_BLOCK, GATHER)  # fmt: skip
