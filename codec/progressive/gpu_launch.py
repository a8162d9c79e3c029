"""Launches of the Triton kernels of both stages, on the current stream, and the device memory that they need.

Encoding is two launches: gpu_encode_kernel.py reads the pages once and writes both stages but for the escapes, which
splitzip's gpu_pack_kernel.py brings together for the second. Each stage is decoded in one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from codec.base import PagedBlock
from codec.progressive.gpu_decode_kernel import decode_anchor_kernel
from codec.progressive.gpu_encode_kernel import encode_stages_kernel
from codec.progressive.gpu_refine_kernel import refine_kernel
from codec.progressive.payload import AnchorPayload, RestPayload
from codec.progressive.plan import Plans
from codec.splitzip.gpu_launch import TUNING, EncodeBuffers, _constants, _launch_pack, byte_pools, tiles_of
from codec.splitzip.plan import aligned


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
    keys, values = (plan.later_bytes if tiles_of(plan) else 0 for plan in plans)
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
        _launch_tiles(encode_stages_kernel, TUNING.encode_words, pages, plans, tiles, table, outputs)
        _launch_pack((plans[0].rest, plans[1].rest), tiles, rests, buffers.anchor)
    else:
        buffers.anchor.totals.zero_()
    scales = buffers.anchor.scales(plans)
    for number, scale in enumerate(pools[2:]):
        half = scales[number * (scales.numel() // 2) :][: scales.numel() // 2].view(scale.shape[0], -1, scale.shape[2])
        torch.index_select(scale, 1, table[: half.shape[1]], out=half)


def launch_decode_anchor(payload: torch.Tensor, layout: AnchorPayload, table: torch.Tensor, out: PagedBlock) -> None:
    """Launch the decoding of a first stage, uint8 on the pool's device, into `out`."""
    pools, index = byte_pools(out), table[: len(out.page_ids)]
    tiles = [0 if part.raw else part.plan.tiles for part in layout.parts]
    if sum(tiles):
        inputs = [(payload[dense:],) for dense in layout.dense_offsets]
        _launch_tiles(decode_anchor_kernel, TUNING.decode_words, out, layout.plans, tiles, table, inputs)
    starts = [(dense, part.plan.raw_bytes) for dense, part in zip(layout.dense_offsets, layout.parts, strict=True)]
    half = layout.scale_bytes // 2
    starts += [(layout.scale_offset, half), (layout.scale_offset + half, half)]
    for number, (pool, (start, size)) in enumerate(zip(pools, starts, strict=False)):
        if number >= 2 or layout.parts[number].raw:
            pool.index_copy_(1, index, payload[start : start + size].view(pool.shape[0], -1, pool.shape[2]))


def launch_refine(payload: torch.Tensor, layout: RestPayload, table: torch.Tensor, out: PagedBlock) -> None:
    """Launch the decoding of a second stage, uint8 on the pool's device, into `out`, which holds the first.

    Records must lie on values.
    """
    tiles = [0 if part.raw else part.plan.tiles for part in layout.parts]
    if not sum(tiles):
        return
    inputs = []
    for part, dense, escapes in zip(layout.parts, layout.dense_offsets, layout.escape_offsets, strict=True):
        records = payload[escapes : escapes + 2 * part.records].view(torch.uint16)
        extensions = payload[escapes + part.escape_bytes - aligned(part.extensions) :]
        inputs.append((payload[dense:], records, extensions))
    _launch_tiles(refine_kernel, TUNING.decode_words, out, layout.plans, tiles, table, inputs)


def _launch_tiles(
    kernel: Any,
    words_a_thread: int,
    pages: PagedBlock,
    plans: Plans,
    tiles: Sequence[int],
    table: torch.Tensor,
    tensors: Sequence[tuple[torch.Tensor, ...]],
) -> None:
    """Launch one of the kernels; tensors: what it takes of keys and of values beside the pools."""
    keys, values = byte_pools(pages)[:2]
    alignment = math.gcd(16, *(number for pool in (keys, values) for number in (pool.data_ptr(), *pool.stride()[:2])))
    plan, other = plans if tiles[0] else plans[::-1]  # of a tensor without tiles nothing is looked at
    shapes = (plan.columns, other.columns if all(tiles) else plan.columns)
    shapes = shapes if tiles[0] else shapes[::-1]
    constants, words = _constants(plan.format, plan.code, plan.rows, *shapes, alignment)
    cut = {"KEY_KEPT_BITS": plans[0].kept_bits, "VALUE_KEPT_BITS": plans[1].kept_bits}
    kernel[(sum(tiles),)](
        keys, values, keys.stride(0), values.stride(0), keys.stride(1), values.stride(1),
        table, len(pages.page_ids), *tiles,
        *(tensor for pair in zip(*tensors, strict=True) for tensor in pair),
        **{name: value for name, value in (constants | cut).items() if name in kernel.arg_names},
        num_warps=TUNING.warps_for(words, words_a_thread),
    )  # fmt: skip
