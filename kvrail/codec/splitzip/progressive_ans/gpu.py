"""The two stages on CUDA: made from the payload in one stage, which stays on the device, and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.gpu import byte_pools, next_power_of_2
from kvrail.codec.core.host import to_device
from kvrail.codec.core.sections import HEADER_BYTES, packed_header
from kvrail.codec.splitzip.entropy.gpu import AnsEncoding, decode_inner, restore_pieces
from kvrail.codec.splitzip.entropy.payload import pieces_of
from kvrail.codec.splitzip.progressive_ans.gpu_kernels import complete_kernel, cut_kernel, join_kernel
from kvrail.codec.splitzip.progressive_ans.payload import (
    SHOWN,
    FirstLayout,
    RestLayout,
    StageLayout,
    rest_layout,
    uncoded_pieces,
)
from kvrail.codec.splitzip.progressive_ans.plan import CutPlan, Plans
from kvrail.codec.splitzip.tiles.gpu_launch import DECODE_WORDS, launch_tiles, make_table, warps_for
from kvrail.codec.splitzip.tiles.payload import Layout


class StagesEncoding(AnsEncoding):
    """An encoding under way: that of `splitzip-ans`, whose significands are cut in two at its end."""

    def __init__(self, pages: PagedBlock, plans: Plans) -> None:
        """Launch the encoding in one stage. Raises CodecError where the rows of a page are not contiguous."""
        super().__init__(pages, plans[0].whole.code, on_device=False)
        self._cuts = plans

    def _assemble(self, layout: Layout, inner: torch.Tensor) -> list[torch.Tensor]:
        """Launch what brings both payloads together, on the device."""
        later = rest_layout((layout.parts[0].raw, layout.parts[1].raw), self._cuts)
        second = torch.zeros(later.size, dtype=torch.uint8, device=inner.device)
        header = np.frombuffer(packed_header(later.raw), dtype=np.uint8)
        second[:HEADER_BYTES] = to_device(header, inner.device)
        pieces = [inner[place] for place in pieces_of(layout)]
        for number, part, plan, place in zip(SHOWN, layout.parts, self._cuts, later.places, strict=True):
            if not part.raw:
                shown = torch.zeros(plan.shown_bytes, dtype=torch.uint8, device=inner.device)
                _launch(cut_kernel, plan, pieces[number], shown, second[place])
                pieces[number] = shown
        return [self._joined(layout.header(), pieces), second]


def encode(pages: PagedBlock, plans: Plans) -> StagesEncoding:
    """Launch the encoding of keys and values by their plans on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    return StagesEncoding(pages, plans)


def decode(
    stage: int, payloads: Sequence[Bytes], layouts: Sequence[StageLayout], plans: Plans, out: PagedBlock
) -> None:
    """Write a stage into `out` on the current stream. Raises CodecError, with `out` untouched, where it cannot."""
    byte_pools(out)
    layout = layouts[-1]
    if isinstance(layout, FirstLayout):
        _decode_first(payloads[-1], layout, plans, out)
    else:
        _decode_rest(payloads[-1], layout, plans, out)


def _decode_first(payload: Bytes, layout: FirstLayout, plans: Plans, out: PagedBlock) -> None:
    """Put the payload in one stage together, its low mantissa bits those of the middle, and decode that."""
    source = to_device(payload, out.device)
    places, end = pieces_of(layout.inner), layout.inner.size
    targets = list(places)
    for number, place in zip(SHOWN, (uncoded_pieces(layout.inner, plans)[number] for number in SHOWN), strict=True):
        targets[number] = slice(end, end + place.stop - place.start)
        end = targets[number].stop
    memory = torch.empty(end, dtype=torch.uint8, device=out.device)
    wrong = restore_pieces(source, layout.pieces, memory, targets)
    for number, part, plan in zip(SHOWN, layout.inner.parts, plans, strict=True):
        if not part.raw:
            _launch(join_kernel, plan, memory[targets[number]], memory[places[number]])
    decode_inner(memory[: layout.inner.size], layout.inner, wrong, out)


def _decode_rest(payload: Bytes, layout: RestLayout, plans: Plans, out: PagedBlock) -> None:
    """Replace the low mantissa bits of values in their pages."""
    tiles = [0 if raw or not plan.rest_bits else plan.whole.tiles for raw, plan in zip(layout.raw, plans, strict=True)]
    if sum(tiles):
        source = to_device(payload, out.device)
        launch_tiles(
            complete_kernel, DECODE_WORDS, out, byte_pools(out), (plans[0].whole, plans[1].whole), tiles,
            make_table(out, (None, None)), [(source[place],) for place in layout.places],
            kept_bits=(plans[0].kept_bits, plans[1].kept_bits),
        )  # fmt: skip


def _launch(kernel: Any, plan: CutPlan, *planes: torch.Tensor) -> None:
    """Launch a kernel of one program a tile over planes of significands."""
    segment = plan.whole.segment_values
    lanes = 1 if segment % 2 else 2
    words = next_power_of_2(segment // lanes)
    kernel[(plan.whole.tiles,)](
        *planes, plan.whole.tiles, plan.field_bits, plan.rest_bits, segment, lanes, words,
        num_warps=warps_for(words, DECODE_WORDS),
    )  # fmt: skip
