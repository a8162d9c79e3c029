"""Launches of the Triton kernels of both stages, on the current stream, and the device memory that they need.

Encoding is two launches: gpu_encode_kernel.py reads the pages once and writes both stages but for the escapes, which
splitzip's gpu_pack_kernel.py brings together for the second. Decoding is one, of the first stage or of both at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.gpu import byte_pools
from kvrail.codec.core.sections import aligned
from kvrail.codec.splitzip.progressive.gpu_decode_kernel import decode_anchor_kernel
from kvrail.codec.splitzip.progressive.gpu_encode_kernel import encode_stages_kernel
from kvrail.codec.splitzip.progressive.gpu_exact_kernel import decode_exact_kernel
from kvrail.codec.splitzip.progressive.payload import StageLayout
from kvrail.codec.splitzip.progressive.plan import Plans
from kvrail.codec.splitzip.tiles.gpu_launch import (
    TUNING,
    EncodeBuffers,
    gather_scales,
    launch_pack,
    launch_tiles,
    place_whole,
    tiles_of,
)


@dataclass(frozen=True, slots=True)
class StageBuffers:
    """Device memory of an encoding; it may be used again for blocks of the same plans, also by a captured graph.

    anchor: of the first stage, and the escapes' slots; rest: uint8, the second stage's parts of keys and values but for
    the escapes, where tensors are coded.
    """

    anchor: EncodeBuffers
    rest: torch.Tensor

    @classmethod
    def allocate(cls, plans: Plans, scale_bytes: int, device: torch.device) -> Self:
        """Uninitialised memory for plans of keys and values, and for so many bytes of scales."""
        size = sum(later_bytes(plans))
        return cls(
            EncodeBuffers.allocate(plans, scale_bytes, device), torch.empty(size, dtype=torch.uint8, device=device)
        )


def later_bytes(plans: Plans) -> tuple[int, int]:
    """Bytes of the second stage's parts of keys and of values but for the escapes.

    0 for what travels raw whatever it holds.
    """
    keys, values = (plan.rest.fixed_bytes if tiles_of(plan) else 0 for plan in plans)
    return keys, values


def launch_encode(pages: PagedBlock, plans: Plans, table: torch.Tensor, buffers: StageBuffers) -> None:
    """Launch the encoding of keys, values and scales into `buffers`; waits for nothing.

    table: of splitzip's `make_table`. A CUDA graph that captures this may be replayed on other contents of pages and
    table. Raises CodecError where the rows of a page are not contiguous.
    """
    pools, dense = byte_pools(pages), buffers.anchor.dense(plans)
    tiles = tiles_of(plans[0]), tiles_of(plans[1])
    if sum(tiles):
        keys, _ = later_bytes(plans)
        rests = buffers.rest[:keys], buffers.rest[keys:]
        slots = buffers.anchor.slots
        outputs = [
            (part, rest, slot.records, slot.extensions) for part, rest, slot in zip(dense, rests, slots, strict=True)
        ]
        words, kept = TUNING.encode_words, _kept_bits(plans)
        launch_tiles(
            encode_stages_kernel, words, pages, pools, plans, tiles, table, outputs,
            kept_bits=kept, quads=True, registers=TUNING.stage_registers,
        )  # fmt: skip
        launch_pack((plans[0].rest, plans[1].rest), tiles, rests, buffers.anchor)
    else:
        buffers.anchor.totals.zero_()
    gather_scales(pools, table, buffers.anchor.scales(plans))


def launch_decode_anchor(payload: torch.Tensor, layout: StageLayout, table: torch.Tensor, out: PagedBlock) -> None:
    """Launch the decoding of a first stage, uint8 on the pool's device, into `out`."""
    pools, index = byte_pools(out), table[: len(out.page_ids)]
    tiles = [0 if part.raw else part.plan.tiles for part in layout.parts]
    if sum(tiles):
        inputs = [(payload[dense:],) for dense in layout.dense_offsets]
        words, kept = TUNING.decode_words, _kept_bits(layout.plans)
        launch_tiles(decode_anchor_kernel, words, out, pools, layout.plans, tiles, table, inputs, kept_bits=kept)
    place_whole(payload, layout, pools, index)


def launch_decode_exact(
    payloads: Sequence[torch.Tensor],
    layouts: Sequence[StageLayout],
    table: torch.Tensor,
    out: PagedBlock,
) -> None:
    """Launch the decoding of both stages, uint8 on the pool's device, into `out`: of what travels raw, nothing.

    Records must lie on values.
    """
    (first, second), (anchor, rest) = payloads, layouts
    tiles = [0 if part.raw else part.plan.tiles for part in rest.parts]
    if not sum(tiles):
        return
    inputs = []
    for number, part in enumerate(rest.parts):
        escapes = rest.escape_offsets[number]
        records = second[escapes : escapes + 2 * part.records].view(torch.uint16)
        extensions = second[escapes + part.escape_bytes - aligned(part.extensions) :]
        dense = first[anchor.dense_offsets[number] :], second[rest.dense_offsets[number] :]
        inputs.append((*dense, records, extensions))
    words, kept = TUNING.joint_words, _kept_bits(anchor.plans)
    pools = byte_pools(out)
    launch_tiles(decode_exact_kernel, words, out, pools, anchor.plans, tiles, table, inputs, kept_bits=kept, quads=True)


def _kept_bits(plans: Plans) -> tuple[int, int]:
    return plans[0].kept_bits, plans[1].kept_bits
