"""Launches of the Triton kernels, on the current stream, and the device memory that they need.

Encoding is one launch and two more a tensor for stage EXACT; decoding ANCHOR, or ANCHOR and RESIDUAL, is one, EXACT one
a tensor. No kernel is compiled again for another number of layers or pages.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch

from kvrail.codec.core.gpu import alignment_of, next_power_of_2
from kvrail.codec.core.plans import geometry
from kvrail.codec.papers.lynx.format import LynxCode
from kvrail.codec.papers.lynx.gpu_exact_kernels import exact_decode_kernel, exact_encode_kernel, lengths_kernel
from kvrail.codec.papers.lynx.gpu_kernels import pages_kernel
from kvrail.codec.papers.lynx.payload import ANCHOR, EXACT, RESIDUAL
from kvrail.codec.papers.lynx.plan import TensorPlan

Plans = Sequence[TensorPlan]

WARPS = 2
EXACT_WARPS = 8
PROGRAM_VALUES = 4096
"""Values of a program, about; a page's rows in whole, of as many columns as that leaves."""


class Geometry(NamedTuple):
    """What a kernel is compiled for, of keys or of values; kernels call it G, as a constant.

    ALIGNMENT: bytes, a power of two, that divides the addresses of all pages. LANES: values of a word. ROWS_IN_CHUNK:
    rows of a chunk, CHUNK the same up to a power of two; ALL_CHUNKS: chunks of a page, CHUNKS those of half a page, up
    to a power of two. WIDTH: columns of a program. PADDED: whether programs have rows or columns that the page has not.
    The others are those of FloatFormat, LynxCode and TensorPlan.
    """

    MANTISSA_BITS: int
    CURVED: int
    ALIGNMENT: int
    LANES: int
    ROWS: int
    HALF_ROWS: int
    ROWS_IN_CHUNK: int
    CHUNKS: int
    CHUNK: int
    ALL_CHUNKS: int
    COLUMNS: int
    WIDTH: int
    PADDED: bool


class ExactGeometry(NamedTuple):
    """What a kernel of stage EXACT is compiled for; kernels call it G, as a constant.

    ROWS_PADDED, WIDTH: rows and columns of a tile, up to a power of two. The others as of Geometry and TensorPlan.
    """

    MANTISSA_BITS: int
    ROWS: int
    ROWS_PADDED: int
    ROWS_IN_CHUNK: int
    ALL_CHUNKS: int
    COLUMNS: int
    TILE_COLUMNS: int
    WIDTH: int

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, plan: TensorPlan) -> Self:
        """Of keys, or of values."""
        return geometry(
            cls,
            plan,
            ROWS_PADDED=next_power_of_2(plan.rows),
            ROWS_IN_CHUNK=plan.code.chunk,
            ALL_CHUNKS=plan.chunks,
            WIDTH=next_power_of_2(plan.tile_columns),
        )


def geometries_of(plans: Sequence[TensorPlan], alignment: int) -> list[Geometry]:
    """Geometries of keys and of values; alignment: as of Geometry. Both have the same LANES: the most that fit both."""
    whole = plans[0].format.item_bytes == 2 and alignment % 8 == 0 and not any(plan.columns % 4 for plan in plans)
    lanes = 4 if whole and all(width_of(plan) >= 4 for plan in plans) else 1
    return [_geometry(plan, lanes, alignment) for plan in plans]


def width_of(plan: TensorPlan) -> int:
    """Columns of a program, a power of two."""
    rows = 2 * next_power_of_2(plan.half_rows)
    return min(next_power_of_2(plan.columns), max(1, PROGRAM_VALUES // rows))


@functools.lru_cache(maxsize=256)
def _geometry(plan: TensorPlan, lanes: int, alignment: int) -> Geometry:
    many = plan.chunks > 1
    return geometry(
        Geometry,
        plan,
        CURVED=int(plan.code.curved),
        ALIGNMENT=alignment,
        LANES=lanes,
        ROWS_IN_CHUNK=plan.code.chunk if many else plan.half_rows,
        CHUNKS=next_power_of_2(plan.half_rows // plan.code.chunk if many else 1),
        CHUNK=plan.code.chunk if many else next_power_of_2(plan.half_rows),
        ALL_CHUNKS=plan.chunks,
        WIDTH=width_of(plan),
        PADDED=_is_padded(plan),
    )


def _is_padded(plan: TensorPlan) -> bool:
    """Whether programs have rows or columns that the page has not."""
    rows_in_chunk = plan.code.chunk if plan.chunks > 1 else plan.half_rows
    chunks = plan.half_rows // rows_in_chunk
    whole = plan.rows == 2 * plan.half_rows and not chunks & (chunks - 1) and not rows_in_chunk & (rows_in_chunk - 1)
    return not whole or plan.columns % width_of(plan) != 0


@dataclass(frozen=True, slots=True)
class ExactBuffers:
    """Device memory of stage EXACT of one tensor.

    dense: uint8, fixed sections; words: int32, the stream, with room for whatever it may be; totals: int64 [2], words
    and escapes; positions, elements: int32, of the escapes in any order, with room for as many as pay off.
    """

    dense: torch.Tensor
    words: torch.Tensor
    totals: torch.Tensor
    positions: torch.Tensor
    elements: torch.Tensor

    @classmethod
    def allocate(cls, plan: TensorPlan, device: torch.device) -> Self:
        """Memory for a plan; words and totals are zeros."""
        item = plan.format.item_bytes
        most_words = plan.tiles * -(-plan.rows * plan.tile_columns * item // 4)
        most_escapes = plan.raw_bytes // (4 + item)
        return cls(
            torch.empty(plan.fixed_bytes[EXACT], dtype=torch.uint8, device=device),
            torch.zeros(most_words, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
            torch.empty(most_escapes, dtype=torch.int32, device=device),
            torch.empty(most_escapes, dtype=torch.int32, device=device),
        )


def launch_encode(
    pools: Sequence[torch.Tensor], table: torch.Tensor, plans: Plans, dense: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Launch the encoding of those tensors whose stage 0 is coded; waits for nothing.

    pools: of splitzip's `byte_pools`; table: int64 [pages], page ids on the device; dense: of ANCHOR and of RESIDUAL,
    the fixed sections of keys and of values, uint8. A CUDA graph that captures this may be replayed on other contents.
    """
    # One warp finds the extremes of columns without shared memory; what needs more registers a value has two.
    warps = 1 if plans[0].format.item_bytes == 2 and not plans[0].code.curved else WARPS
    _launch(pools, table, plans, [*dense[ANCHOR], *dense[RESIDUAL]], ENCODES=True, STAGE=RESIDUAL, num_warps=warps)


def launch_decode(
    pools: Sequence[torch.Tensor], table: torch.Tensor, plans: Plans, dense: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Launch the decoding of ANCHOR or, where `dense` has both, of ANCHOR and RESIDUAL; arguments as of launch_encode.

    Tensors that travel raw are left as they are.
    """
    stage = len(dense) - 1
    # What needs more registers a value has more warps for them: both stages at once, and the tables of a curved map.
    warps = 2 * WARPS if stage == RESIDUAL or plans[0].code.curved else WARPS
    _launch(pools, table, plans, [*dense[ANCHOR], *dense[stage]], ENCODES=False, STAGE=stage, num_warps=warps)


def launch_exact_encode(
    pool: torch.Tensor, table: torch.Tensor, plan: TensorPlan, dense: Sequence[torch.Tensor], buffers: ExactBuffers
) -> None:
    """Launch stage EXACT of one tensor; dense: its fixed sections of the stages before."""
    for name in {"scales", "widths"} & plan.sections[EXACT].keys():
        plan.sections[EXACT][name].of(buffers.dense).copy_(plan.sections[RESIDUAL][name].of(dense[RESIDUAL]))
    refined = torch.empty((plan.num_layers, plan.num_pages, pool.shape[2]), dtype=torch.uint8, device=pool.device)
    places = torch.arange(plan.num_pages, device=pool.device)
    launch_decode([refined, refined], places, [plan, _nothing_of(plan)], [[part, part] for part in dense])
    item = torch.uint32 if plan.format.item_bytes == 4 else torch.uint16
    geometry = ExactGeometry.of(plan)
    reach = float(plan.code.reach)
    numbers = refined.view(item), plan.num_pages, plan.pages, buffers.dense
    lengths_kernel[(plan.tiles,)](*numbers, reach, geometry, num_warps=EXACT_WARPS, enable_fp_fusion=False)
    ends = _ends(buffers.dense, plan)
    buffers.totals[0] = ends[-1]
    exact_encode_kernel[(plan.tiles,)](
        pool, pool.stride(0), pool.stride(1), table, *numbers, ends, reach, buffers.words, buffers.totals[1:],
        buffers.positions, buffers.elements, buffers.positions.numel(), ALIGNMENT=alignment_of([pool]), G=geometry,
        num_warps=EXACT_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def launch_exact_decode(
    pool: torch.Tensor, table: torch.Tensor, plan: TensorPlan, dense: torch.Tensor, words: torch.Tensor
) -> None:
    """Launch the decoding of stage EXACT of one tensor, but for its escapes; words: int32, its stream."""
    exact_decode_kernel[(plan.tiles,)](
        pool, pool.stride(0), pool.stride(1), table, plan.num_pages, plan.pages, dense, _ends(dense, plan),
        float(plan.code.reach), words, ALIGNMENT=alignment_of([pool]), G=ExactGeometry.of(plan), num_warps=EXACT_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def _ends(dense: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """Words up to the last of each tile, int64 [tiles]."""
    return plan.sections[EXACT]["lengths"].of(dense).view(torch.int32).cumsum(0, dtype=torch.int64)


def _nothing_of(plan: TensorPlan) -> TensorPlan:
    """A plan of no pages, for launches that have but one tensor."""
    return replace(plan, num_layers=0)


def _launch(
    pools: Sequence[torch.Tensor], table: torch.Tensor, plans: Plans, dense: Sequence[torch.Tensor], **options: int
) -> None:
    """Launch the kernel of keys and values; options: its constants, and how it is launched."""
    programs = [0 if plan.raw else plan.pages * -(-plan.columns // width_of(plan)) for plan in plans]
    if not sum(programs):
        return
    plan, geometries = plans[0] if plans[0].pages else plans[1], geometries_of(plans, alignment_of(pools))
    pages_kernel[(sum(programs),)](
        *pools, *(pool.stride(0) for pool in pools), *(pool.stride(1) for pool in pools),
        table, plan.num_pages, plan.pages, programs[0], *dense, tables_of(plan.code, table.device),
        **options, KEYS=geometries[0], VALUES=geometries[1], enable_fp_fusion=False,
    )  # fmt: skip


@functools.cache
def tables_of(code: LynxCode, device: torch.device) -> torch.Tensor:
    """Edges, middles, steps and rates of a code, float32 [33], on a device."""
    return torch.from_numpy(np.concatenate([code.edges, code.middles, code.steps, code.rates])).to(device)
