"""Launches of the Triton kernels, on the current stream.

Encoding is two launches: gpu_encode_kernel.py reads the pages once and leaves every tile's escapes in a slot of its
own, from where they are brought together. Decoding is one, gpu_decode_kernel.py.
"""

import torch

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.gpu import byte_pools
from kvrail.codec.core.sections import aligned
from kvrail.codec.splitzip.one_stage.gpu_kernels import tiles_kernel
from kvrail.codec.splitzip.tiles.gpu_launch import (
    DECODE_WORDS,
    ENCODE_WORDS,
    EncodeBuffers,
    Plans,
    gather_scales,
    launch_pack,
    launch_tiles,
    place_whole,
    tiles_of,
)
from kvrail.codec.splitzip.tiles.payload import Layout


def launch_encode(pages: PagedBlock, plans: Plans, table: torch.Tensor, buffers: EncodeBuffers) -> None:
    """Launch the encoding of keys, values and scales into `buffers`; waits for nothing.

    table: of `make_table`. A CUDA graph that captures this may be replayed on other contents of pages and table.
    Raises CodecError where the rows of a page are not contiguous.
    """
    pools, dense = byte_pools(pages), buffers.dense(plans)
    tiles = tiles_of(plans[0]), tiles_of(plans[1])
    if sum(tiles):
        slots = [(slot.records, slot.extensions) for slot in buffers.slots]
        outputs = [(part, *slot) for part, slot in zip(dense, slots, strict=True)]
        launch_tiles(tiles_kernel, ENCODE_WORDS, pages, pools, plans, tiles, table, outputs, ENCODES=True)
        launch_pack(plans, tiles, dense, buffers)
    else:
        buffers.totals.zero_()
    gather_scales(pools, table, buffers.scales(plans))


def launch_decode(payload: torch.Tensor, layout: Layout, table: torch.Tensor, out: PagedBlock) -> None:
    """Launch the decoding of a payload, uint8 on the pool's device, into `out`. Every record must lie on a value."""
    pools, index = byte_pools(out), table[: len(out.page_ids)]
    plans = layout.parts[0].plan, layout.parts[1].plan
    tiles = [0 if part.raw else part.plan.tiles for part in layout.parts]
    inputs = []
    for part, dense, escapes in zip(layout.parts, layout.offsets, layout.streams, strict=True):
        records = payload[escapes : escapes + 2 * part.records].view(torch.uint16)
        extensions = payload[escapes + part.variable_bytes - aligned(part.extensions) :]
        inputs.append((payload[dense:], records, extensions))
    if sum(tiles):
        launch_tiles(tiles_kernel, DECODE_WORDS, out, pools, plans, tiles, table, inputs, ENCODES=False)
    place_whole(payload, layout, pools, index)
